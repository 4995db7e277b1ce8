"""The plane's self-signed certificate, which first contact proves with the join secret.

There is no certificate authority: a worker trusts exactly the one certificate that first contact has proved.
A host name adds nothing then, so it is not checked.
"""

import datetime
import hashlib
import ipaddress
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from aegis_elastic.bus.credentials import write_private

_VALIDITY = datetime.timedelta(days=3650)
# Clocks of nodes differ: a certificate must not be "not valid yet" on one of them.
_BACKDATED = datetime.timedelta(days=2)


@dataclass(frozen=True)
class Certificate:
    """Paths of a server's certificate and private key; `pem` is the certificate only, safe to publish."""

    cert_path: Path
    key_path: Path
    pem: str

    @property
    def fingerprint(self) -> str:
        """Sha256 of the certificate's DER form, 64 hex digits."""
        return fingerprint(self.pem)


def make_certificate(directory: Path, hosts: Sequence[str]) -> Certificate:
    """Make a self-signed EC P-256 certificate for `hosts` (names or addresses) in two 0600 files; returns it.

    OSError as the file system says; ValueError for no hosts.
    """
    if not hosts:
        raise ValueError("cannot make a certificate: name at least one host or address")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "aegis control plane")])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + _VALIDITY)
        .add_extension(x509.SubjectAlternativeName([_alternative(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    cert_path, key_path = directory / "plane.crt", directory / "plane.key"
    write_private(key_path, private)
    write_private(cert_path, pem)
    return Certificate(cert_path, key_path, pem.decode())


def load_certificate(directory: Path) -> Certificate:
    """Return the certificate that `make_certificate` left in `directory`; OSError if there is none."""
    cert_path, key_path = directory / "plane.crt", directory / "plane.key"
    key_path.stat()
    return Certificate(cert_path, key_path, cert_path.read_text())


def fingerprint(pem: str) -> str:
    """Return the sha256 (hex) of the DER form of a PEM certificate; ValueError if it is none."""
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem)).hexdigest()


def client_context(pem: str) -> ssl.SSLContext:
    """Return a context that trusts exactly the certificate `pem`; ValueError if it is none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    try:
        context.load_verify_locations(cadata=pem)
    except ssl.SSLError as error:
        raise ValueError("cannot trust the plane's certificate: not a PEM certificate") from error
    return context


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
