"""The cluster's own certificate authority, kept for the life of the cluster."""

from __future__ import annotations

from dataclasses import dataclass

from localcluster import shell
from localcluster.layout import NETWORK, NODE_NAME, Addresses, Layout

_DAYS = "3650"
_EC_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate to issue: file name, subject, and the addresses it serves."""

    name: str
    subject: str
    addresses: tuple[str, ...] = ()


def ensure(layout: Layout, addresses: Addresses) -> None:
    """Issue what is missing: the authority, each certificate, the token key pair."""
    layout.pki.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not layout.certificate("ca").exists():
        _issue_authority(layout)
    for certificate in _certificates(addresses):
        if not layout.certificate(certificate.name).exists():
            _issue(layout, certificate)
    if not layout.certificate("service-account").exists():
        _issue_token_keys(layout)


def _certificates(addresses: Addresses) -> tuple[Certificate, ...]:
    return (
        Certificate(
            "apiserver",
            "/CN=kube-apiserver",
            (
                "IP:127.0.0.1",
                f"IP:{addresses.service}",
                f"IP:{addresses.node}",
                "DNS:localhost",
                "DNS:kubernetes",
                "DNS:kubernetes.default",
                "DNS:kubernetes.default.svc",
                "DNS:kubernetes.default.svc.cluster.local",
            ),
        ),
        Certificate("etcd", "/CN=etcd", ("IP:127.0.0.1", "DNS:localhost")),
        Certificate("kubelet-server", f"/CN={NODE_NAME}", (f"IP:{addresses.node}", f"DNS:{NODE_NAME}")),
        Certificate("kubelet", f"/O=system:nodes/CN=system:node:{NODE_NAME}"),
        Certificate("admin", "/O=system:masters/CN=admin"),
        Certificate("kube-controller-manager", "/CN=system:kube-controller-manager"),
        Certificate("kube-scheduler", "/CN=system:kube-scheduler"),
    )


def _issue_authority(layout: Layout) -> None:
    shell.run(
        [
            *("openssl", "req", "-x509", *_EC_KEY, "-subj", f"/CN={NETWORK}", "-days", _DAYS),
            *("-addext", "keyUsage=critical,keyCertSign,cRLSign,digitalSignature"),
            *("-keyout", layout.key("ca"), "-out", layout.certificate("ca")),
        ]
    )


def _issue(layout: Layout, certificate: Certificate) -> None:
    """Sign one certificate; the file appears last, so an interrupt is repaired."""
    request = layout.pki / f"{certificate.name}.csr"
    extensions = layout.pki / f"{certificate.name}.ext"
    unfinished = layout.pki / f"{certificate.name}.unfinished"
    lines = ["extendedKeyUsage=clientAuth,serverAuth", "keyUsage=digitalSignature"]
    if certificate.addresses:
        lines.append(f"subjectAltName={','.join(certificate.addresses)}")
    extensions.write_text("\n".join(lines) + "\n")
    shell.run(
        [
            *("openssl", "req", *_EC_KEY, "-subj", certificate.subject),
            *("-keyout", layout.key(certificate.name), "-out", request),
        ]
    )
    shell.run(
        [
            *("openssl", "x509", "-req", "-in", request, "-days", _DAYS, "-CAcreateserial"),
            *("-CA", layout.certificate("ca"), "-CAkey", layout.key("ca")),
            *("-extfile", extensions, "-out", unfinished),
        ]
    )
    unfinished.replace(layout.certificate(certificate.name))


def _issue_token_keys(layout: Layout) -> None:
    """The pair that signs service-account tokens; the public half is its 'certificate'."""
    key = layout.key("service-account")
    shell.run(["openssl", "genrsa", "-out", key, "2048"])
    public = shell.run(["openssl", "rsa", "-in", key, "-pubout"])
    layout.certificate("service-account").write_text(public)
