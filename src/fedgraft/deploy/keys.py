"""Certificates and keys of a federation: an authority of its own, one server certificate, one key pair per node.

Private keys are P-384, written with mode 0600 before a byte is in them, and never overwritten.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import ipaddress
import os
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedgraft.core.errors import FedgraftError, MissingExtra

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

AUTHORITY_DAYS = 5 * 365
SERVER_DAYS = 397  # some TLS libraries refuse longer-lived server certificates


def _crypto() -> tuple[Any, Any, Any, Any]:
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise MissingExtra("cryptography", "flower", "a federation's certificates and keys") from error
    return x509, hashes, serialization, ec


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read; an existing one is refused."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise FedgraftError(
            f"{path} is there already, and a private key is never overwritten; move it away first."
        ) from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def make_node_key(folder: Path, name: str) -> tuple[Path, Path]:
    """A node's key pair, `NAME.key` (stays here) and `NAME.pub` (goes to the coordinator), in OpenSSH's format."""
    _, _, serialization, ec = _crypto()
    key = ec.generate_private_key(ec.SECP384R1())
    folder.mkdir(parents=True, exist_ok=True)
    private, public = folder / f"{name}.key", folder / f"{name}.pub"
    encoding, bare = serialization.Encoding, serialization.NoEncryption()
    write_private(private, key.private_bytes(encoding.PEM, serialization.PrivateFormat.OpenSSH, bare))
    line = key.public_key().public_bytes(encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    public.write_bytes(line + f" {name} {_MARK}{public_identity(identity_of(private)).hex()}\n".encode())
    return private, public


_MARK = "fedgraft-identity="


def identity_of(private: Path) -> bytes:
    """The key by which a node signs in secure sums. It follows from the node's key: one key, one identity, for good."""
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    _, hashes, serialization, _ = _crypto()
    key = serialization.load_ssh_private_key(private.read_bytes(), None)
    secret = key.private_numbers().private_value.to_bytes(48, "big")
    return HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=b"fedgraft node identity").derive(secret)


def public_identity(identity: bytes) -> bytes:
    """What others know an identity by."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(identity).public_key().public_bytes_raw()


def announced_identity(public: Path) -> tuple[str, bytes]:
    """The name and the identity key that a .pub file announces."""
    public_key_of(public)
    name, _, mark = " ".join(public.read_text().split()[2:]).partition(" ")
    try:
        return name, bytes.fromhex(mark.removeprefix(_MARK) if mark.startswith(_MARK) else "none")
    except ValueError:
        raise FedgraftError(
            f"{public} announces no identity key; its owner makes one with: fedgraft deploy key."
        ) from None


def short(identity: bytes) -> str:
    """An identity key in a form that two people can compare by voice: 16 hexadecimal digits of its hash, in fours."""
    digits = hashlib.sha256(b"fedgraft identity" + identity).hexdigest()[:16]
    return " ".join(digits[i : i + 4] for i in range(0, 16, 4))


def public_key_of(path: Path) -> str:
    """The public key in a file, as one OpenSSH line without its comment; anything else is refused."""
    _, _, serialization, ec = _crypto()
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError):
        raise FedgraftError(
            f"there is no readable public key file {path}; the node makes one with: fedgraft deploy key NAME."
        ) from None
    if "PRIVATE KEY" in text:
        raise FedgraftError(f"{path} is a private key, which must never leave its node; give the .pub file beside it.")
    try:
        key = serialization.load_ssh_public_key(text.encode())
    except Exception:
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise FedgraftError(f"{path} is not a public key made by `fedgraft deploy key`.")
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()


def key_bytes(path: Path) -> bytes:
    """A public key file in the form that Flower stores."""
    _, _, serialization, _ = _crypto()
    key = serialization.load_ssh_public_key(public_key_of(path).encode())
    return bytes(key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo))


def fingerprint(path: Path) -> str:
    """The short form of a public key that two people can compare by voice, as `ssh-keygen -lf` prints it."""
    blob = base64.b64decode(public_key_of(path).split()[1])
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def check_private_key(path: Path) -> None:
    """Refuse a file that is no node's private key, or that other accounts of the machine can read."""
    _, _, serialization, ec = _crypto()
    if not path.is_file():
        raise FedgraftError(f"there is no key file {path}; make one with: fedgraft deploy key NAME.")
    if path.stat().st_mode & 0o077:
        raise FedgraftError(f"other accounts can read the private key {path}; run: chmod 600 {path}")
    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), None)
    except Exception:
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise FedgraftError(f"{path} is not a private key made by `fedgraft deploy key`; give the .key file.")


def check_authority(path: Path) -> None:
    """Refuse a file that holds no certificate to check the server by."""
    if not path.is_file():
        raise FedgraftError(f"there is no certificate {path}; ask the coordinator for the federation's ca.crt.")
    try:
        ssl.create_default_context().load_verify_locations(cafile=path)
    except (ssl.SSLError, OSError):
        raise FedgraftError(f"{path} is not a certificate; ask the coordinator for the federation's ca.crt.") from None


def renew_server_certificate(folder: Path, host: str) -> None:
    """A new server key and certificate from the federation's own authority; nodes keep the ca.crt they have."""
    x509, _, serialization, ec = _crypto()
    authority = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    issuer = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes()).subject
    server = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, host[:64])])
    leaf = _certificate(issuer, subject, server, authority, SERVER_DAYS, _server_extensions(host))
    formats = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    fresh = {"server.key": server.private_bytes(*formats), "server.crt": leaf.public_bytes(serialization.Encoding.PEM)}
    for name, content in fresh.items():
        (folder / f".{name}.new").unlink(missing_ok=True)
        write_private(folder / f".{name}.new", content)
    for name in fresh:
        (folder / f".{name}.new").replace(folder / name)


def make_certificates(folder: Path, host: str) -> None:
    """An authority and a server certificate for `host` and this machine: ca.crt, ca.key, server.crt, server.key."""
    x509, _, serialization, ec = _crypto()
    folder.mkdir(mode=0o700, parents=True)
    authority, server = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"fedgraft federation at {host}"[:64])])
    root = _certificate(issuer, issuer, authority, authority, AUTHORITY_DAYS, _authority_extensions())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, host[:64])])
    leaf = _certificate(issuer, subject, server, authority, SERVER_DAYS, _server_extensions(host))
    for name, key in (("ca.key", authority), ("server.key", server)):
        formats = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        write_private(folder / name, key.private_bytes(*formats))
    for name, certificate in (("ca.crt", root), ("server.crt", leaf)):
        (folder / name).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def _certificate(
    issuer: Any,
    subject: Any,
    owner: EllipticCurvePrivateKey,
    signer: EllipticCurvePrivateKey,
    days: int,
    more: list[tuple[Any, bool]],
) -> Any:
    x509, hashes, _, _ = _crypto()
    begin = datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=5)  # clocks differ a little
    builder = (
        x509.CertificateBuilder()
        .issuer_name(issuer)
        .subject_name(subject)
        .public_key(owner.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(begin + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(owner.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    for extension, critical in more:
        builder = builder.add_extension(extension, critical=critical)
    return builder.sign(signer, hashes.SHA384())


def _usage(**used: bool) -> Any:
    x509 = _crypto()[0]
    names = (
        "digital_signature",
        "content_commitment",
        "key_encipherment",
        "data_encipherment",
        "key_agreement",
        "key_cert_sign",
        "crl_sign",
        "encipher_only",
        "decipher_only",
    )
    return x509.KeyUsage(**{name: used.get(name, False) for name in names})


def _authority_extensions() -> list[tuple[Any, bool]]:
    x509 = _crypto()[0]
    return [(x509.BasicConstraints(ca=True, path_length=0), True), (_usage(key_cert_sign=True, crl_sign=True), True)]


def _server_extensions(host: str) -> list[tuple[Any, bool]]:
    x509 = _crypto()[0]
    names = [_general_name(name) for name in dict.fromkeys([host, "localhost", "127.0.0.1", "::1"])]
    purpose = x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH])
    return [
        (x509.SubjectAlternativeName(names), False),
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_usage(digital_signature=True), True),
        (purpose, False),
    ]


def _general_name(name: str) -> Any:
    x509 = _crypto()[0]
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def days_left(certificate: Path) -> int:
    """Whole days until a certificate runs out; negative once it has."""
    x509 = _crypto()[0]
    found = x509.load_pem_x509_certificate(certificate.read_bytes())
    return int((found.not_valid_after_utc - datetime.datetime.now(datetime.UTC)).total_seconds() // 86400)
