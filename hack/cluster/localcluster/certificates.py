"""The cluster's certificate authority, which exists as long as the cluster. Needs OpenSSL 3."""

from __future__ import annotations

from pathlib import Path

from localcluster import debian, shell
from localcluster.layout import NETWORK, NODE_NAME, Addresses, Layout

_NEW = (
    *("openssl", "req", "-x509", "-days", "3650"),
    *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
)
_OF_AUTHORITY = ("keyUsage=critical,keyCertSign,cRLSign,digitalSignature",)
_OF_OTHERS = (
    "basicConstraints=critical,CA:FALSE",
    "extendedKeyUsage=clientAuth,serverAuth",
    "keyUsage=digitalSignature",
)


def ensure(layout: Layout, addresses: Addresses) -> None:
    """Create the missing files of the authority, the certificates and the key pair for tokens."""
    if not layout.certificate("service-account").exists():
        debian.install_missing({"openssl": "openssl"})
    layout.pki.mkdir(parents=True, exist_ok=True, mode=0o700)
    _issue(layout, "ca", f"/CN={NETWORK}", _OF_AUTHORITY)
    authority = ("-CA", layout.certificate("ca"), "-CAkey", layout.key("ca"))
    service = "DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc"
    api = f"IP:127.0.0.1,IP:{addresses.service},IP:{addresses.node},DNS:localhost,{service}"
    for name, subject, names in (
        ("apiserver", "/CN=kube-apiserver", f"{api},DNS:kubernetes.default.svc.cluster.local"),
        ("etcd", "/CN=etcd", "IP:127.0.0.1,DNS:localhost"),
        ("kubelet-server", f"/CN={NODE_NAME}", f"IP:{addresses.node},DNS:{NODE_NAME}"),
        ("kubelet", f"/O=system:nodes/CN=system:node:{NODE_NAME}", ""),
        ("admin", "/O=system:masters/CN=admin", ""),
        ("kube-controller-manager", "/CN=system:kube-controller-manager", ""),
        ("kube-scheduler", "/CN=system:kube-scheduler", ""),
    ):
        served = (f"subjectAltName={names}",) if names else ()
        _issue(layout, name, subject, (*_OF_OTHERS, *served), *authority)
    public = layout.certificate("service-account")
    if (
        not public.exists()
    ):  # the public half of the pair that signs service-account tokens is its 'certificate'
        key = layout.key("service-account")
        shell.run(["openssl", "genrsa", "-out", key, "2048"])
        public.write_text(shell.run(["openssl", "rsa", "-in", key, "-pubout"]))


def _issue(
    layout: Layout, name: str, subject: str, extensions: tuple[str, ...], *authority: str | Path
) -> None:
    """Issue a certificate, unless it exists. Its file is created last, so that an interrupted call can be repeated."""
    certificate = layout.certificate(name)
    if certificate.exists():
        return
    unfinished = certificate.with_suffix(".unfinished")
    added = [word for extension in extensions for word in ("-addext", extension)]
    shell.run([*_NEW, *authority, "-subj", subject, *added, "-keyout", layout.key(name), "-out", unfinished])
    unfinished.replace(certificate)
