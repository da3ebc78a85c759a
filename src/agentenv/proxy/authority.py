"""The node's own certificate authority: makes and renews the certificate for `<domain>` and `*.<domain>`.

Files in one folder per domain (keys 0600):

    ca.pem  ca-key.pem       the authority; clients trust `ca.pem` once
    leaf.pem  leaf-key.pem   what the server shows: the certificate, and behind it the authority's
    trust.pem                the machine's own roots and `ca.pem`: for clients whose setting replaces all roots

Invariants: the authority can sign for nothing outside its domain (critical name constraints, RFC 5280 section 4.2.1.10), so trusting
it endangers no other site; a key never leaves the folder; every file is whole or absent, and a pair that does not match is made anew.
"""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from agentenv.core.clock import Clock
from agentenv.host.files import write_atomic

CA_DAYS = 3650
LEAF_DAYS = 90
LEAF_RENEWED_DAYS = 30
"""A leaf is renewed this long before it ends, as public authorities advise."""
_SKEW = timedelta(days=1)  # clients' clocks may be behind
_SYSTEM_ROOTS = (Path("/etc/ssl/certs/ca-certificates.crt"), Path("/etc/pki/tls/certs/ca-bundle.crt"), Path("/etc/ssl/cert.pem"))
_COMMON_NAME_MAX = 64  # RFC 5280 appendix A.1

Pair = tuple[x509.Certificate, ec.EllipticCurvePrivateKey]


class LocalAuthority:
    """The authority for one domain (a name without port). All methods are idempotent, and block for milliseconds."""

    def __init__(self, folder: Path, domain_name: str, clock: Clock) -> None:
        self._folder = folder
        self._domain = domain_name
        self._clock = clock
        self._ca_key_file = folder / "ca-key.pem"
        self.ca_file = folder / "ca.pem"
        self.trust_file = folder / "trust.pem"
        self.cert_file = folder / "leaf.pem"
        self.key_file = folder / "leaf-key.pem"

    def ensure(self) -> None:
        """Make what is missing, renew what ends soon. OSError when the folder cannot be written."""
        ca = _load(self.ca_file, self._ca_key_file)
        if ca is None or not self._lasts(ca[0], LEAF_DAYS):
            ca = self._make_ca()
        self._update_trust(ca[0])
        leaf = _load(self.cert_file, self.key_file)
        if leaf is None or not _issued_by(leaf[0], ca[0]) or not self._lasts(leaf[0], LEAF_RENEWED_DAYS):
            self._make_leaf(*ca)

    def certificate(self) -> x509.Certificate:
        """The authority's certificate. FileNotFoundError before the first `ensure`."""
        return x509.load_pem_x509_certificate(self.ca_file.read_bytes())

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._clock.now_ms() / 1000, UTC)

    def _lasts(self, certificate: x509.Certificate, days: int) -> bool:
        now = self._now()
        return certificate.not_valid_before_utc <= now and now + timedelta(days=days) < certificate.not_valid_after_utc

    def _make_ca(self) -> Pair:
        key = ec.generate_private_key(ec.SECP256R1())
        digest = x509.SubjectKeyIdentifier.from_public_key(key.public_key()).digest.hex()[:8]
        name = _name(f"AgentENV CA {digest} for {self._domain}")  # the digest tells a new authority from the one before it
        everywhere = [x509.IPAddress(ipaddress.ip_network(network)) for network in ("0.0.0.0/0", "::/0")]
        certificate = (
            self._builder(name, name, key, CA_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(x509.NameConstraints([x509.DNSName(self._domain)], everywhere), critical=True)
            .sign(key, hashes.SHA256())
        )
        write_atomic(self._ca_key_file, _key_pem(key), 0o600)
        write_atomic(self.ca_file, _pem(certificate), 0o644)
        return certificate, key

    def _make_leaf(self, ca: x509.Certificate, ca_key: ec.EllipticCurvePrivateKey) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.DNSName(self._domain), x509.DNSName(f"*.{self._domain}")]
        certificate = (
            self._builder(_name(self._domain), ca.subject, key, LEAF_DAYS)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
            .sign(ca_key, hashes.SHA256())
        )
        write_atomic(self.key_file, _key_pem(key), 0o600)
        write_atomic(self.cert_file, _pem(certificate) + _pem(ca), 0o644)

    def _builder(self, subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int) -> x509.CertificateBuilder:
        now = self._now()
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _SKEW)
            .not_valid_after(now + timedelta(days=days))
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )

    def _update_trust(self, ca: x509.Certificate) -> None:
        roots = next((path.read_bytes() for path in _SYSTEM_ROOTS if path.is_file()), b"")
        wanted = _pem(ca) + roots
        if not self.trust_file.exists() or self.trust_file.read_bytes() != wanted:
            write_atomic(self.trust_file, wanted, 0o644)


def _load(cert_file: Path, key_file: Path) -> Pair | None:
    """A certificate with the key that belongs to it; None if either is missing or damaged, or they do not match."""
    try:
        certificate = x509.load_pem_x509_certificate(cert_file.read_bytes())
        key = load_pem_private_key(key_file.read_bytes(), None)
    except (FileNotFoundError, ValueError):
        return None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        return None
    return certificate, key


def _issued_by(certificate: x509.Certificate, ca: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:_COMMON_NAME_MAX])])


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
