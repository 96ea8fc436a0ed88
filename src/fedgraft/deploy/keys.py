"""Certificates and keys of a federation: its own certificate authority, one server certificate, one key pair per node.

Private keys are P-384. Their files are created with mode 0600 before anything is written, and never overwritten.
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
"""Days that a federation's authority is valid."""
SERVER_DAYS = 397
"""Days that a server certificate is valid; some TLS libraries refuse longer ones."""
_IDENTITY_MARK = "fedgraft-identity="  # in the comment of a .pub file


def _crypto() -> tuple[Any, Any, Any, Any]:
    """Return the modules of `cryptography` that are used here: x509, hashes, serialization, ec."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise MissingExtra("cryptography", "flower", "a federation's certificates and keys") from error
    return x509, hashes, serialization, ec


# ---- key pairs of nodes ----------------------------------------------------------------------------------------------


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read; refuse to overwrite one."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise FedgraftError(
            "E-DEPLOY-KEY-EXISTS",
            f"{path} exists already, and a private key is never overwritten",
            "move it away first",
            path=str(path),
        ) from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def make_node_key(folder: Path, name: str) -> tuple[Path, Path]:
    """Write a node's key pair in OpenSSH's format and return the paths of `NAME.key` (private) and `NAME.pub`."""
    _, _, serialization, ec = _crypto()
    key = ec.generate_private_key(ec.SECP384R1())
    folder.mkdir(parents=True, exist_ok=True)
    private = folder / f"{name}.key"
    public = folder / f"{name}.pub"
    encoding = serialization.Encoding
    private_bytes = key.private_bytes(encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption())
    write_private(private, private_bytes)
    line = key.public_key().public_bytes(encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    identity = public_identity(node_identity(private)).hex()
    public.write_bytes(line + f" {name} {_IDENTITY_MARK}{identity}\n".encode())
    return private, public


def node_identity(private: Path) -> bytes:
    """Return the private key by which a node signs in secure sums, derived from its key: one key, one identity."""
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    _, hashes, serialization, _ = _crypto()
    key = serialization.load_ssh_private_key(private.read_bytes(), None)
    secret = key.private_numbers().private_value.to_bytes(48, "big")
    return HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=b"fedgraft node identity").derive(secret)


def public_identity(identity: bytes) -> bytes:
    """Return the public half of an identity key."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(identity).public_key().public_bytes_raw()


def announced_identity(public: Path) -> tuple[str, bytes]:
    """Return the node's name and its public identity key from a .pub file."""
    public_key_line(public)
    comment = " ".join(public.read_text().split()[2:])
    name, _, mark = comment.partition(" ")
    try:
        if not mark.startswith(_IDENTITY_MARK):
            raise ValueError("no identity in the comment")
        return name, bytes.fromhex(mark.removeprefix(_IDENTITY_MARK))
    except ValueError:
        raise FedgraftError(
            "E-DEPLOY-NO-IDENTITY",
            f"{public} contains no identity key",
            "its owner makes one with: fedgraft deploy key NAME",
            path=str(public),
        ) from None


def short_identity(identity: bytes) -> str:
    """Return 16 hexadecimal digits of an identity key's hash, in fours: a form that two people can compare by voice."""
    digits = hashlib.sha256(b"fedgraft identity" + identity).hexdigest()[:16]
    return " ".join(digits[start : start + 4] for start in range(0, 16, 4))


def public_key_line(path: Path) -> str:
    """Return the public key of a file as one OpenSSH line without its comment; refuse anything else."""
    _, _, serialization, ec = _crypto()
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError):
        raise FedgraftError(
            "E-DEPLOY-NO-PUBLIC-KEY",
            f"there is no readable public key file {path}",
            "the node makes one with: fedgraft deploy key NAME",
            path=str(path),
        ) from None
    if "PRIVATE KEY" in text:
        raise FedgraftError(
            "E-DEPLOY-PRIVATE-KEY-SENT",
            f"{path} is a private key, which must never leave its node",
            "use the .pub file beside it",
            path=str(path),
        )
    try:
        key = serialization.load_ssh_public_key(text.encode())
    except Exception:
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise FedgraftError(
            "E-DEPLOY-BAD-PUBLIC-KEY",
            f"{path} is not a public key of a node",
            "use the NAME.pub file that `fedgraft deploy key NAME` wrote",
            path=str(path),
        )
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()


def flower_key_bytes(path: Path) -> bytes:
    """Return the public key of a file in the form that Flower stores."""
    _, _, serialization, _ = _crypto()
    key = serialization.load_ssh_public_key(public_key_line(path).encode())
    return bytes(key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo))


def key_fingerprint(path: Path) -> str:
    """Return the fingerprint of a public key as `ssh-keygen -lf` prints it, for two people to compare by voice."""
    blob = base64.b64decode(public_key_line(path).split()[1])
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def check_private_key(path: Path) -> None:
    """Refuse a file that is not a node's private key, or that other accounts of the machine can read."""
    _, _, serialization, ec = _crypto()
    if not path.is_file():
        raise FedgraftError(
            "E-DEPLOY-NO-PRIVATE-KEY",
            f"there is no key file {path}",
            "make one with: fedgraft deploy key NAME",
            path=str(path),
        )
    if path.stat().st_mode & 0o077:
        raise FedgraftError(
            "E-DEPLOY-KEY-READABLE",
            f"other accounts can read the private key {path}",
            f"run: chmod 600 {path}",
            path=str(path),
        )
    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), None)
    except Exception:
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise FedgraftError(
            "E-DEPLOY-BAD-PRIVATE-KEY",
            f"{path} is not a private key of a node",
            "use the NAME.key file that `fedgraft deploy key NAME` wrote",
            path=str(path),
        )


# ---- certificates of the server --------------------------------------------------------------------------------------


def check_authority(path: Path) -> None:
    """Refuse a file that contains no certificate to verify the server by."""
    if not path.is_file():
        raise FedgraftError(
            "E-DEPLOY-NO-CERTIFICATE",
            f"there is no certificate {path}",
            "ask the coordinator for the federation's ca.crt",
            path=str(path),
        )
    try:
        ssl.create_default_context().load_verify_locations(cafile=path)
    except (ssl.SSLError, OSError):
        raise FedgraftError(
            "E-DEPLOY-BAD-CERTIFICATE",
            f"{path} is not a certificate",
            "ask the coordinator for the federation's ca.crt",
            path=str(path),
        ) from None


def make_certificates(folder: Path, host: str) -> None:
    """Write an authority (ca.crt, ca.key) and a certificate for `host` and this machine (server.crt, server.key)."""
    _, _, serialization, ec = _crypto()
    folder.mkdir(mode=0o700, parents=True)
    authority = ec.generate_private_key(ec.SECP384R1())
    server = ec.generate_private_key(ec.SECP384R1())
    issuer = _common_name(f"fedgraft federation at {host}")
    root = _certificate(issuer, issuer, authority, authority, AUTHORITY_DAYS, _authority_extensions())
    leaf = _certificate(issuer, _common_name(host), server, authority, SERVER_DAYS, _server_extensions(host))
    write_private(folder / "ca.key", _pem(authority))
    write_private(folder / "server.key", _pem(server))
    (folder / "ca.crt").write_bytes(root.public_bytes(serialization.Encoding.PEM))
    (folder / "server.crt").write_bytes(leaf.public_bytes(serialization.Encoding.PEM))


def renew_server_certificate(folder: Path, host: str) -> None:
    """Replace the server's key and certificate, signed by the same authority, so that nodes keep their ca.crt."""
    x509, _, serialization, ec = _crypto()
    authority = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    issuer = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes()).subject
    server = ec.generate_private_key(ec.SECP384R1())
    leaf = _certificate(issuer, _common_name(host), server, authority, SERVER_DAYS, _server_extensions(host))
    contents = {"server.key": _pem(server), "server.crt": leaf.public_bytes(serialization.Encoding.PEM)}
    for name, content in contents.items():
        (folder / f".{name}.new").unlink(missing_ok=True)
        write_private(folder / f".{name}.new", content)
    for name in contents:
        (folder / f".{name}.new").replace(folder / name)


def days_left(certificate: Path) -> int:
    """Return the whole days until a certificate expires; negative once it has."""
    x509 = _crypto()[0]
    expiry = x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc
    return int((expiry - datetime.datetime.now(datetime.UTC)).total_seconds() // 86400)


def _pem(key: EllipticCurvePrivateKey) -> bytes:
    """Return a private key as PEM, without encryption."""
    _, _, serialization, _ = _crypto()
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _common_name(name: str) -> Any:
    """Return an X.509 name; its length is limited to 64 characters."""
    x509 = _crypto()[0]
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name[:64])])


def _certificate(
    issuer: Any,
    subject: Any,
    owner: EllipticCurvePrivateKey,
    signer: EllipticCurvePrivateKey,
    days: int,
    extensions: list[tuple[Any, bool]],
) -> Any:
    """Return a certificate of the key `owner` for `subject`, signed by the key `signer` of `issuer`, valid for `days`.

    Each extension comes with whether it is critical.
    """
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
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical=critical)
    return builder.sign(signer, hashes.SHA384())


def _key_usage(*purposes: str) -> Any:
    """Return the key usage extension with only these purposes allowed."""
    x509 = _crypto()[0]
    usage = dict.fromkeys(
        (
            "digital_signature",
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "key_cert_sign",
            "crl_sign",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    for purpose in purposes:
        usage[purpose] = True
    return x509.KeyUsage(**usage)


def _authority_extensions() -> list[tuple[Any, bool]]:
    """Return the extensions of the authority's certificate, and whether each is critical."""
    x509 = _crypto()[0]
    return [
        (x509.BasicConstraints(ca=True, path_length=0), True),
        (_key_usage("key_cert_sign", "crl_sign"), True),
    ]


def _server_extensions(host: str) -> list[tuple[Any, bool]]:
    """Return the extensions of the server's certificate, and whether each is critical."""
    x509 = _crypto()[0]
    hosts = dict.fromkeys([host, "localhost", "127.0.0.1", "::1"])
    return [
        (x509.SubjectAlternativeName([_general_name(name) for name in hosts]), False),
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_key_usage("digital_signature"), True),
        (x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH]), False),
    ]


def _general_name(name: str) -> Any:
    """Return a host as an alternative name of a certificate: an IP address or a DNS name."""
    x509 = _crypto()[0]
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
