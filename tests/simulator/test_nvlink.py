"""Links, peers, distances and fabric of every machine."""

from __future__ import annotations

from itertools import combinations

import pynvml
import pytest

DGX_1V = {
    (0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2, (2, 6): 1, (3, 7): 1,
    (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2,
}  # fmt: skip
PAIRS = {
    "dgx-1v": DGX_1V,
    "hgx-h100-4": dict.fromkeys(combinations(range(4), 2), 6),
    "a30-4": {(0, 1): 4, (2, 3): 4},
    "a100-pcie-pairs": {(0, 1): 12, (2, 3): 12},
}


def active(gpu):
    links = []
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            if pynvml.nvmlDeviceGetNvLinkState(gpu, link):
                links.append(link)
        except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_InvalidArgument):
            break
    return links


@pytest.mark.parametrize("name", sorted(PAIRS))
def test_direct_links(name, look, handles):
    look(name)
    gpus = handles()
    index_of = {pynvml.nvmlDeviceGetPciInfo(gpu).busId: index for index, gpu in enumerate(gpus)}
    counted = {}
    for index, gpu in enumerate(gpus):
        for link in active(gpu):
            assert pynvml.nvmlDeviceGetNvLinkRemoteDeviceType(gpu, link) == pynvml.NVML_NVLINK_DEVICE_TYPE_GPU
            peer = index_of[pynvml.nvmlDeviceGetNvLinkRemotePciInfo(gpu, link).busId]
            counted[index, peer] = counted.get((index, peer), 0) + 1
    assert counted == {**PAIRS[name], **{(b, a): count for (a, b), count in PAIRS[name].items()}}
    for first, second in combinations(range(len(gpus)), 2):
        status = pynvml.nvmlDeviceGetP2PStatus(gpus[first], gpus[second], pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
        assert (status == pynvml.NVML_P2P_STATUS_OK) == ((first, second) in PAIRS[name])


def test_what_a_link_says_about_its_switch(look, handles, refused):
    look("dgx-a100-40gb")
    remote = {pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handles()[0], link).busId for link in range(12)}
    assert remote == {f"00000000:C{number}:00.0" for number in range(4, 10)}
    look("dgx-h100")
    assert pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handles()[0], 0).busId == "FFFFFFFF:FF:FF.0"
    look("h100-mig-static")
    call = pynvml.nvmlDeviceGetNvLinkRemotePciInfo
    assert refused(call, handles()[2], 0) == pynvml.NVML_ERROR_NOT_SUPPORTED
