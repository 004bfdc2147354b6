"""Certificates: a TLS client and Flower's own parsers take them, nothing is
lost, and mistakes are explained.
"""

from __future__ import annotations

import socket
import ssl
import stat
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
)
from cryptography.hazmat.primitives.serialization.ssh import load_ssh_public_key
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from fednoro.core.types import UserError
from fednoro.flower.ops.certificates import Certificates, load_certificate, make, names_in

HOSTS = ("localhost", "127.0.0.1", "::1", "link.example.org")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make(tmp_path_factory.mktemp("certificates"), HOSTS, ("north", "south"), days=30)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def shake_hands(ours: Certificates, trusted: Path, name: str) -> str | None:
    """A TLS client that trusts `trusted` against a server with our
    certificate: the version agreed on.
    """
    listening = socket.create_server(("127.0.0.1", 0))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(ours.server, ours.server_key)

    def serve() -> None:
        connection, _ = listening.accept()
        try:
            server.wrap_socket(connection, server_side=True).close()
        except (ssl.SSLError, OSError):
            connection.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        client = ssl.create_default_context(cafile=str(trusted))
        with (
            socket.create_connection(listening.getsockname()) as plain,
            client.wrap_socket(plain, server_hostname=name) as secure,
        ):
            return secure.version()
    finally:
        thread.join()
        listening.close()


@pytest.mark.parametrize("name", HOSTS)
def test_a_tls_client_accepts_the_server_under_each_of_its_names(
    made: Certificates, name: str
) -> None:
    assert shake_hands(made, made.ca, name) == "TLSv1.3"


@pytest.mark.parametrize("name", ["127.0.0.2", "example.org"])
def test_a_tls_client_refuses_the_server_under_any_other_name(
    made: Certificates, name: str
) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match=r"mismatch|not valid for"):
        shake_hands(made, made.ca, name)


def test_a_client_of_another_federation_refuses_the_server(
    made: Certificates, tmp_path: Path
) -> None:
    other = make(tmp_path, HOSTS, ())
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(made, other.ca, "localhost")


def test_the_chain_is_valid_from_now_until_it_expires(made: Certificates) -> None:
    leaf = load_certificate(made.server)
    store = Store([load_certificate(made.ca)])
    verify = (
        PolicyBuilder().store(store).build_server_verifier(x509.DNSName("link.example.org")).verify
    )
    assert len(verify(leaf, [])) == 2
    late = PolicyBuilder().store(store).time(datetime.now(UTC) + timedelta(days=31))
    with pytest.raises(VerificationError):
        late.build_server_verifier(x509.DNSName("link.example.org")).verify(leaf, [])
    assert timedelta(days=29) < made.expires - datetime.now(UTC) < timedelta(days=30)
    assert made.ca_expires > made.expires


def test_names_and_addresses_are_kept_apart_in_the_certificate(made: Certificates) -> None:
    names = (
        load_certificate(made.server)
        .extensions.get_extension_for_class(x509.SubjectAlternativeName)
        .value
    )
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "link.example.org"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == [
        "127.0.0.1",
        "::1",
    ]
    assert set(names_in(load_certificate(made.server))) == set(HOSTS)


def test_node_keys_are_what_flower_reads(made: Certificates) -> None:
    assert set(made.sites) == {"north", "south"}
    publics = set()
    for site, file in made.sites.items():
        private = load_ssh_private_key(file.read_bytes(), None)
        public = load_ssh_public_key(made.public_key(site).read_bytes())
        assert isinstance(private, ec.EllipticCurvePrivateKey) and private.curve.name == "secp384r1"
        assert private.public_key() == public
        publics.add(public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    assert len(publics) == 2


def test_private_keys_are_their_owners_alone(made: Certificates) -> None:
    assert [mode(file) for file in (made.ca_key, made.server_key, *made.sites.values())] == [
        0o600
    ] * 4


def test_a_site_is_added_later_without_touching_what_is_there(tmp_path: Path) -> None:
    first = make(tmp_path, ("localhost",), ("north",))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    second = make(tmp_path, (), ("west",))
    assert {path: path.read_bytes() for path in before} == before
    assert set(second.sites) == {"north", "west"} and second.expires == first.expires
    assert second.new_files == (tmp_path / "keys/west", tmp_path / "keys/west.pub")


def test_a_site_is_added_while_the_cas_key_is_locked_away(tmp_path: Path) -> None:
    make(tmp_path, ("localhost",)).ca_key.unlink()
    assert set(make(tmp_path, (), ("west",)).sites) == {"west"}
    with pytest.raises(UserError, match=r"ca\.key cannot be read"):
        make(tmp_path, ("localhost",), force=True)


def test_nothing_is_replaced_unless_asked(tmp_path: Path) -> None:
    first = make(tmp_path, ("localhost",), ("north", "south"))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="--force to replace its key"):
        make(tmp_path, (), ("east", "north"))
    with pytest.raises(UserError, match=r"server\.pem is for localhost: say --force"):
        make(tmp_path, ("elsewhere.org",), ())
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    again = make(tmp_path, ("elsewhere.org",), ("north",), force=True)
    changed = {path.name for path, content in before.items() if path.read_bytes() != content}
    assert changed == {"server.pem", "server.key", "north", "north.pub"}
    assert names_in(load_certificate(again.server)) == ["elsewhere.org"]
    assert shake_hands(again, first.ca, "elsewhere.org")


def test_the_same_command_twice_changes_nothing(tmp_path: Path) -> None:
    make(tmp_path, HOSTS)
    assert make(tmp_path, HOSTS).new_files == ()


@pytest.mark.parametrize(
    ("hosts", "sites", "days", "message"),
    [
        ((), ("a",), 1, "needs a name"),
        (("localhost:8000",), (), 1, "without a port; got 'localhost:8000'"),
        (("https://link",), (), 1, "without a port"),
        (("300.1.1.1",), (), 1, "DNS name or an IP address"),
        (("",), (), 1, "DNS name or an IP address"),
        (("localhost",), ("../evil",), 1, "a site's name is"),
        (("localhost",), ("",), 1, "a site's name is"),
        (("localhost",), ("a.pub",), 1, "a site's name is"),
        (("localhost",), ("a", "a"), 1, "names a site twice"),
        (("localhost",), (), 0, "--days must be at least 1"),
    ],
)
def test_mistakes_are_named_before_anything_is_written(
    tmp_path: Path, hosts: tuple[str, ...], sites: tuple[str, ...], days: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        make(tmp_path / "new", hosts, sites, days)
    assert not (tmp_path / "new").exists()


def test_a_certificate_never_outlives_its_ca(tmp_path: Path) -> None:
    make(tmp_path, ("localhost",))
    with pytest.raises(UserError, match=r"ca\.crt expires on .* use fewer --days"):
        make(tmp_path, ("localhost",), days=5000, force=True)
    long = make(tmp_path / "long", ("localhost",), days=5000)
    assert long.ca_expires > long.expires


def test_parts_that_do_not_belong_together_are_noticed(tmp_path: Path) -> None:
    ours, theirs = (
        make(tmp_path / "ours", ("localhost",)),
        make(tmp_path / "theirs", ("localhost",)),
    )
    ours.ca_key.write_bytes(theirs.ca_key.read_bytes())
    with pytest.raises(UserError, match="does not belong to"):
        make(tmp_path / "ours", ("localhost",), force=True)
    theirs.server_key.unlink()
    with pytest.raises(UserError, match=r"server\.pem is there without server\.key"):
        make(tmp_path / "theirs", (), ("a",))
    ours.ca.write_text("no certificate")
    with pytest.raises(UserError, match="not a certificate in PEM format"):
        load_certificate(ours.ca)
