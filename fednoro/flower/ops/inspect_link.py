"""The way from a site to the SuperLink: CA file, node key, name, port, TLS, clock."""

from __future__ import annotations

import http.client
import socket
import ssl
import stat
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from fednoro.flower.ops.certificates import load_certificate, names_in, public_key_of
from fednoro.flower.ops.check_result import Check, failed, ok, warning

TIMEOUT = 10.0  # seconds, for each step
EXPIRES_SOON = timedelta(days=30)
# Flower refuses a node whose clock is further ahead, or further behind, than this.
MOST_AHEAD, MOST_BEHIND = timedelta(seconds=5), timedelta(seconds=305)


def inspect_ca(file: Path) -> Iterator[Check]:
    """The certificate that a site trusts the SuperLink by."""
    certificate = load_certificate(file)
    now = datetime.now(UTC)
    try:
        authority = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        authority = False
    expires = certificate.not_valid_after_utc
    if not authority:
        yield failed(
            "ca",
            f"{file} is not a CA's certificate",
            "ask the coordinator for ca.crt, not server.pem",
        )
    elif expires < now:
        yield failed(
            "ca", f"{file} expired on {expires:%Y-%m-%d}", "ask the coordinator for the new ca.crt"
        )
    elif certificate.not_valid_before_utc > now:
        yield failed("ca", f"{file} is not valid yet", "set this machine's clock (NTP)")
    elif expires - now < EXPIRES_SOON:
        yield warning(
            "ca", f"{file} expires on {expires:%Y-%m-%d}", "ask the coordinator for a new ca.crt"
        )
    else:
        yield ok("ca", f"{file} is valid until {expires:%Y-%m-%d}")


def inspect_key(file: Path) -> Iterator[Check]:
    """The private key that tells the SuperLink which site this is."""
    new_key_advice = "make one with: ssh-keygen -t ecdsa -b 384 -N '' -f KEY"
    try:
        content = file.read_bytes()
    except OSError as error:
        yield failed(
            "key",
            f"{file} cannot be read: {error.strerror or error}",
            "name the site's private key, or " + new_key_advice,
        )
        return
    if content.startswith((b"ecdsa-sha2-", b"ssh-")):
        yield failed(
            "key", f"{file} is a public key", "name the private one, the same file without .pub"
        )
        return
    try:
        key = load_ssh_private_key(content, None)
    except TypeError:  # cryptography's way of asking for a passphrase
        yield failed(
            "key", f"{file} has a passphrase", f"remove it with: ssh-keygen -p -N '' -f {file}"
        )
        return
    except Exception as error:  # one type for each kind of damage
        yield failed(
            "key", f"{file} is not an OpenSSH private key ({type(error).__name__})", new_key_advice
        )
        return
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        yield failed("key", f"{file} is not an elliptic-curve key", new_key_advice)
        return
    if key.curve.name != "secp384r1":
        yield warning("key", f"{file} is on {key.curve.name}, not P-384", new_key_advice)
    if stat.S_IMODE(file.stat().st_mode) & 0o077:
        yield failed("key", f"others can read {file}", f"chmod 600 {file}")
        return
    public = public_key_of(file)
    where = public if public.exists() else f"the output of: ssh-keygen -y -f {file}"
    yield ok("key", f"{file} is a P-384 key; the coordinator registers {where}")


def inspect_connection(superlink: str, ca: Path | None) -> Iterator[Check]:
    """TCP, TLS and the clock, one after the other;
    the first that fails is the last that is tried.
    """
    host, port = _parse(superlink)
    if not host:
        yield failed(
            "connection", f"{superlink!r} is not HOST:PORT", "write it like link.example.org:8000"
        )
        return
    try:
        plain = socket.create_connection((host, port), TIMEOUT)
    except socket.gaierror:
        yield failed(
            "connection",
            f"the name {host} is not known here",
            "check the spelling, or the site's DNS",
        )
        return
    except ConnectionRefusedError:
        yield failed(
            "connection",
            f"{superlink} refuses connections",
            "is the SuperLink running, and on this port?",
        )
        return
    except OSError as error:
        advice = (
            f"open outgoing TCP to {superlink} in the site's firewall, "
            "and incoming at the coordinator's"
        )
        yield failed("connection", f"{superlink} cannot be reached ({error})", advice)
        return
    yield ok("connection", f"TCP to {superlink}")
    with plain:
        yield from _inspect_tls(plain, host, ca)


def _inspect_tls(plain: socket.socket, host: str, ca: Path | None) -> Iterator[Check]:
    context = ssl.create_default_context(cafile=None if ca is None else str(ca))
    address = plain.getpeername()[:2]  # wrapping takes the socket away, also where it fails
    try:
        secure = context.wrap_socket(plain, server_hostname=host)
    except ssl.SSLCertVerificationError as error:
        yield _certificate_problem(error, host, address)
        return
    except OSError as error:
        yield failed(
            "tls",
            f"no TLS handshake with {host} ({error})",
            "is something else on that port, or in between?",
        )
        return
    with secure:
        expires = parsedate_to_datetime(str((secure.getpeercert() or {})["notAfter"]))
        remaining = expires.astimezone(UTC) - datetime.now(UTC)
        if remaining < EXPIRES_SOON:
            advice = (
                "the coordinator renews it: "
                "fednoro flower certs DIR --host … --force, and restarts the SuperLink"
            )
            yield warning(
                "tls", f"the SuperLink's certificate expires in {remaining.days} days", advice
            )
        else:
            yield ok(
                "tls", f"{secure.version()}, certificate for {host} valid until {expires:%Y-%m-%d}"
            )
        yield from _inspect_clock(secure, host)


def _certificate_problem(
    error: ssl.SSLCertVerificationError, host: str, address: tuple[str, int]
) -> Check:
    reason = error.verify_message or str(error)
    if error.verify_code in (62, 64):
        # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
        names = ", ".join(_names_at(address)) or "no name at all"
        advice = (
            "use one of those names, or the coordinator renews it: "
            f"fednoro flower certs DIR --host {host} --force"
        )
        return failed("tls", f"the SuperLink's certificate is for {names}, not for {host}", advice)
    if error.verify_code == 10:  # X509_V_ERR_CERT_HAS_EXPIRED
        advice = (
            "the coordinator renews it: "
            "fednoro flower certs DIR --host … --force, and restarts the SuperLink"
        )
        return failed("tls", "the SuperLink's certificate has expired", advice)
    if error.verify_code == 9:  # X509_V_ERR_CERT_NOT_YET_VALID
        return failed(
            "tls", "the SuperLink's certificate is not valid yet", "set this machine's clock (NTP)"
        )
    advice = (
        "use this federation's ca.crt with --root-certificates; if it is, "
        "something in between reads the traffic"
    )
    return failed("tls", f"the SuperLink's certificate is not from this CA ({reason})", advice)


def _names_at(address: tuple[str, int]) -> list[str]:
    try:
        return names_in(
            x509.load_pem_x509_certificate(
                ssl.get_server_certificate(address, timeout=TIMEOUT).encode()
            )
        )
    except (OSError, ValueError):
        return []


def _inspect_clock(secure: ssl.SSLSocket, host: str) -> Iterator[Check]:
    connection = http.client.HTTPConnection(host, timeout=TIMEOUT)
    connection.sock = secure
    try:
        connection.request("HEAD", "/")
        date = connection.getresponse().getheader("Date")
    except (OSError, http.client.HTTPException) as error:
        yield failed(
            "clock", f"{host} does not speak HTTP ({error})", "is that a SuperLink of Flower 1.41?"
        )
        return
    if date is None:
        yield warning(
            "clock", f"{host} does not tell its time", "see to it that both machines run NTP"
        )
        return
    ahead = datetime.now(UTC) - parsedate_to_datetime(date)
    if -MOST_BEHIND < ahead < MOST_AHEAD:
        yield ok("clock", "agrees with the SuperLink's")
        return
    side = "ahead of" if ahead > timedelta(0) else "behind"
    message = (
        f"this machine is {abs(ahead).total_seconds():.0f} s {side} the SuperLink, "
        "which will refuse it"
    )
    yield failed("clock", message, "set both clocks by NTP")


def _parse(superlink: str) -> tuple[str, int]:
    host, _, port = superlink.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    valid = host and "/" not in host and port.isdigit() and 0 < int(port) < 65536
    return (host, int(port)) if valid else ("", 0)
