"""How the plugin asks the MPS host. Blocking, safe from any thread, one connection a request."""

from __future__ import annotations

import os
import socket
import time

import structlog

from dra_driver.errors import PermanentError, RetryableError
from dra_driver.model.mps import MpsDaemonSpec, MpsDaemonStatus, MpsKind
from dra_driver.mps import protocol
from dra_driver.mps.connection import peer_uid, read_line, short_path
from dra_driver.mps.layout import MpsLayout
from dra_driver.mps.records import DaemonRecords
from dra_driver.mps.without_host import leave_stop

_log = structlog.get_logger(__name__)

_RECONNECT_S = 0.02
_RESTART_S = 10.0
"""How long a request whose host died under it waits for the next host."""
_MARGIN_S = 2.0
"""How much longer than the host itself the client waits, so that the host's own words arrive."""


class NoMpsHostError(RetryableError):
    """No MPS host listens."""

    has_no_effect = True


class _BrokenOffError(RetryableError):
    """The host ended before it answered."""


class MpsClient:
    """Asks the host of one layout. `connect_s` is how long a host that restarts is waited for."""

    def __init__(self, layout: MpsLayout, *, connect_s: float = 1.0) -> None:
        self._layout = layout
        self._path = layout.socket
        self._connect_s = connect_s

    def ensure(self, spec: MpsDaemonSpec, timeout_s: float = 20.0) -> MpsDaemonStatus:
        """The daemon's status once it is ready, or found in FAULT; at once if it runs already.

        Raises: PermanentError if it cannot be as asked, RetryableError if it was not ready in time or there is no host.
        """
        try:
            statuses = self._ask(protocol.Ensure(spec, timeout_s), timeout_s)
        except PermanentError as error:
            if spec.others and "'others'" in str(error):
                raise PermanentError(
                    "the MPS host is older than the driver and has no daemon for several GPUs "
                    f"({', '.join(spec.devices)}); delete its pod once no MPS claims run on the node, or ask for one "
                    "GPU a request"
                ) from error
            raise
        if len(statuses) != 1:
            raise protocol.ProtocolError(
                f"the MPS host answered with {len(statuses)} statuses instead of one"
            )
        return statuses[0]

    def stop(
        self,
        device: str,
        timeout_s: float = 20.0,
        *,
        gpu_uuid: str | None = None,
        kind: MpsKind | None = None,
    ) -> None:
        """No process of the device's daemon runs, and the GPU has its former compute mode; also if there was none.

        With `gpu_uuid` and `kind` the host puts the compute mode back even if its record is lost. Raises:
        NoMpsHostError if no host runs and a daemon was there, which the next host then stops; RetryableError,
        PermanentError.
        """
        try:
            self._ask(protocol.Stop(device, timeout_s, gpu_uuid, kind), timeout_s)
        except NoMpsHostError as error:
            if leave_stop(self._layout, device, gpu_uuid, kind):
                _log.warning("mps_stop_left_to_next_host", device=device, reason=str(error))
                raise
        else:
            if DaemonRecords(self._layout).has_any(device):
                # The host answers when no process is left, also if the compute mode could not be set.
                raise RetryableError(
                    f"the MPS host could not put the compute mode of device {device} back yet; it tries again"
                )

    def status_if_any(self, timeout_s: float) -> tuple[MpsDaemonStatus, ...]:
        """As `status`; none where no host listens."""
        return self.status(timeout_s) if self._path.exists() else ()

    def status(self, timeout_s: float = 5.0) -> tuple[MpsDaemonStatus, ...]:
        """All daemons of the node, by name. Raises: RetryableError."""
        return self._ask(protocol.Status(), timeout_s)

    def ping(self, timeout_s: float = 1.0) -> None:
        """Returns if a host answers. Raises: RetryableError."""
        self._ask(protocol.Ping(), timeout_s)

    def _ask(self, request: protocol.Request, timeout_s: float) -> tuple[MpsDaemonStatus, ...]:
        """Every request may be repeated: if the host ends before it answers, the next one is asked the same."""
        message = protocol.encode_request(request)
        end = time.monotonic() + timeout_s
        connect_s = self._connect_s
        while True:
            left = max(0.0, end - time.monotonic())
            try:
                return self._ask_once(message, left, connect_s)
            except _BrokenOffError:
                if not self._connect_s or time.monotonic() + _RECONNECT_S >= end:
                    raise
            connect_s = _RESTART_S
            time.sleep(_RECONNECT_S)

    def _ask_once(self, message: bytes, timeout_s: float, connect_s: float) -> tuple[MpsDaemonStatus, ...]:
        with self._connect(timeout_s, connect_s) as connection:
            try:
                connection.settimeout(timeout_s + _MARGIN_S)
                connection.sendall(message)
                line = read_line(connection, bytearray(), time.monotonic() + timeout_s + _MARGIN_S)
            except TimeoutError as error:
                raise RetryableError(f"the MPS host did not answer within {timeout_s:.3g} s") from error
            except OSError as error:
                raise _BrokenOffError(
                    f"the connection to the MPS host broke: {error.strerror or error}"
                ) from error
        if line is None:
            raise _BrokenOffError("the MPS host was stopped before it answered; the request may be repeated")
        return protocol.decode_reply(line)

    def _connect(self, timeout_s: float, connect_s: float) -> socket.socket:
        deadline = time.monotonic() + min(timeout_s, connect_s)
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.settimeout(max(0.1, timeout_s))
                with short_path(self._path) as address:
                    connection.connect(address)
                self._check_peer(connection)
            except OSError as error:
                connection.close()
                if time.monotonic() >= deadline:
                    raise self._nobody(error) from error
                time.sleep(_RECONNECT_S)
            except BaseException:
                connection.close()
                raise
            else:
                return connection

    def _check_peer(self, connection: socket.socket) -> None:
        uid = peer_uid(connection)
        if uid not in (0, os.geteuid()):
            raise RetryableError(f"{self._path} is served by user {uid}, not by root")

    def _nobody(self, error: OSError) -> NoMpsHostError:
        return NoMpsHostError(
            f"no MPS host answers on {self._path} ({error.strerror or error}): start the DaemonSet "
            "gpu-dra-driver-mps, or `gpu-dra-driver mps-host` with the same --kubelet-plugins-directory-path"
        )
