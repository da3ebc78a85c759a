"""The local authority: what clients accept from it, what they never would, and how it renews."""

import asyncio
import contextlib
import datetime
import ipaddress
import ssl

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from agentenv.core.clock import SystemClock
from agentenv.core.errors import HostNotReady
from agentenv.proxy.authority import CA_DAYS, LEAF_DAYS, LEAF_RENEWED_DAYS, LocalAuthority
from agentenv.proxy.tls import TlsIdentity, keep_fresh

DAY_MS = 86_400_000


class LateClock(SystemClock):
    """The system's, some days later."""

    days = 0.0

    def now_ms(self):
        return super().now_ms() + int(self.days * DAY_MS)


@pytest.fixture
def clock():
    return LateClock()


@pytest.fixture
def authority(tmp_path, clock):
    made = LocalAuthority(tmp_path / "ca", "sbx.test", clock)
    made.ensure()
    return made


def handshake(context, name, trusted, offers=()):
    """Shake hands in memory; returns the client's end, or raises what the client raises."""
    client_in, client_out, server_in, server_out = (ssl.MemoryBIO() for _ in range(4))
    client_context = ssl.create_default_context(cafile=trusted)
    if offers:
        client_context.set_alpn_protocols(offers)
    client = client_context.wrap_bio(client_in, client_out, server_hostname=name)
    server = context.wrap_bio(server_in, server_out, server_side=True)
    done = set()
    while len(done) < 2:
        for end, out, other in ((client, client_out, server_in), (server, server_out, client_in)):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
                done.add(end)
            other.write(out.read())
    return client


def shown(context, authority):
    """The certificate that a client which trusts `authority` sees."""
    return handshake(context, "api.sbx.test", authority.ca_file).getpeercert(binary_form=True)


@pytest.mark.parametrize("name", ["sbx.test", "api.sbx.test", "sandbox.sbx.test", "49983-iabcdefghij0123456789.sbx.test"])
@pytest.mark.parametrize("trust", ["ca_file", "trust_file"])
def test_clients_that_trust_it_accept_every_name_of_the_domain(authority, name, trust):
    identity = TlsIdentity(authority.cert_file, authority.key_file, authority.ensure)
    assert handshake(identity.context, name, getattr(authority, trust))


@pytest.mark.parametrize("name", ["other.test", "test", "a.b.sbx.test", "xsbx.test", "127.0.0.1"])
def test_other_names_are_not_covered(authority, name):
    identity = TlsIdentity(authority.cert_file, authority.key_file)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(identity.context, name, authority.ca_file)


def test_clients_that_do_not_trust_it_refuse(authority):
    identity = TlsIdentity(authority.cert_file, authority.key_file)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(identity.context, "api.sbx.test", None)


@pytest.mark.parametrize("alternative", [x509.DNSName("bank.example"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
def test_a_thief_of_its_key_can_sign_for_nothing_else(authority, tmp_path, alternative):
    ca_key = load_pem_private_key((authority.ca_file.parent / "ca-key.pem").read_bytes(), None)
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    forged = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(authority.certificate().subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([alternative]), critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    (tmp_path / "forged.pem").write_bytes(forged.public_bytes(Encoding.PEM))
    from agentenv.proxy.authority import _key_pem

    (tmp_path / "forged-key.pem").write_bytes(_key_pem(key))
    context = TlsIdentity(tmp_path / "forged.pem", tmp_path / "forged-key.pem").context
    with pytest.raises(ssl.SSLCertVerificationError, match=r"permitted subtree|excluded subtree"):
        handshake(context, str(alternative.value), authority.ca_file)


def test_keys_are_private_and_nothing_is_remade_without_need(authority):
    before = {path.name: path.read_bytes() for path in authority.ca_file.parent.iterdir()}
    authority.ensure()
    assert {path.name: path.read_bytes() for path in authority.ca_file.parent.iterdir()} == before
    assert {path.name: path.stat().st_mode & 0o777 for path in authority.ca_file.parent.iterdir()} == {
        "ca.pem": 0o644,
        "ca-key.pem": 0o600,
        "leaf.pem": 0o644,
        "leaf-key.pem": 0o600,
        "trust.pem": 0o644,
    }


@pytest.mark.parametrize(
    ("days", "new_leaf", "new_ca"),
    [
        (LEAF_DAYS - LEAF_RENEWED_DAYS - 1, False, False),
        (LEAF_DAYS - LEAF_RENEWED_DAYS + 1, True, False),
        (LEAF_DAYS + 100, True, False),
        (CA_DAYS - LEAF_DAYS - 1, True, False),
        (CA_DAYS - LEAF_DAYS + 1, True, True),
        (-30, True, True),  # the clock was wrong when they were made: not valid yet
    ],
)
def test_renewal_is_early_and_keeps_the_authority_as_long_as_it_can(authority, clock, days, new_leaf, new_ca):
    ca, leaf = authority.ca_file.read_bytes(), authority.cert_file.read_bytes()
    clock.days = days
    authority.ensure()
    assert (authority.cert_file.read_bytes() != leaf, authority.ca_file.read_bytes() != ca) == (new_leaf, new_ca)
    assert authority.ca_file.read_bytes() in authority.trust_file.read_bytes()


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "foreign", "garbage"])
@pytest.mark.parametrize("name", ["ca.pem", "ca-key.pem", "leaf.pem", "leaf-key.pem"])
def test_damaged_files_are_replaced(authority, tmp_path, clock, name, damage):
    file = authority.ca_file.parent / name
    if damage == "missing":
        file.unlink()
    elif damage == "foreign":
        other = LocalAuthority(tmp_path / "other", "sbx.test", clock)
        other.ensure()
        file.write_bytes((tmp_path / "other" / name).read_bytes())
    else:
        file.write_bytes({"empty": b"", "cut": file.read_bytes()[:80], "garbage": b"\xff\x00" * 99}[damage])
    authority.ensure()
    identity = TlsIdentity(authority.cert_file, authority.key_file)
    assert handshake(identity.context, "api.sbx.test", authority.ca_file)


def test_each_domain_has_its_own(authority, tmp_path, clock):
    other = LocalAuthority(tmp_path / "other", "else.test", clock)
    other.ensure()
    assert other.certificate().subject != authority.certificate().subject


async def test_a_new_certificate_is_taken_up_without_a_new_listener(authority):
    identity = TlsIdentity(authority.cert_file, authority.key_file, authority.ensure)
    first = shown(identity.context, authority)
    task = asyncio.create_task(keep_fresh(identity, 0.01))
    authority.cert_file.unlink()
    until = asyncio.get_running_loop().time() + 10
    while shown(identity.context, authority) == first:
        assert asyncio.get_running_loop().time() < until
        await asyncio.sleep(0.02)
    task.cancel()


@pytest.mark.parametrize("damage", [b"", b"garbage", None])
async def test_a_bad_new_certificate_leaves_the_old_one(authority, caplog, damage):
    identity = TlsIdentity(authority.cert_file, authority.key_file)
    first = shown(identity.context, authority)
    if damage is None:
        authority.key_file.unlink()
    else:
        authority.key_file.write_bytes(damage)
    task = asyncio.create_task(keep_fresh(identity, 0.01))
    until = asyncio.get_running_loop().time() + 10
    while "the old certificate stays in use" not in caplog.text:
        assert asyncio.get_running_loop().time() < until
        await asyncio.sleep(0.02)
    task.cancel()
    assert shown(identity.context, authority) == first


@pytest.mark.parametrize("which", ["absent", "swapped", "empty"])
def test_files_of_the_operator_that_cannot_work_are_named(authority, tmp_path, which):
    files = {
        "absent": (tmp_path / "none.pem", authority.key_file),
        "swapped": (authority.key_file, authority.cert_file),
        "empty": (authority.cert_file, tmp_path / "empty"),
    }[which]
    (tmp_path / "empty").touch()
    with pytest.raises(HostNotReady, match=str(files[0])) as caught:
        TlsIdentity(*files)
    assert "api.tls_cert" in caught.value.hint


@pytest.mark.parametrize(("offers", "chosen"), [(["h2", "http/1.1"], "http/1.1"), (["h2"], "h2"), (["http/1.0"], None), ([], None)])
def test_the_protocol_a_client_gets(authority, offers, chosen):
    context = TlsIdentity(authority.cert_file, authority.key_file).context
    assert handshake(context, "api.sbx.test", authority.ca_file, offers).selected_alpn_protocol() == chosen
