"""Certificates and keys of a federation:
a CA, the SuperLink's certificate and a key pair for each site.

    DIR/ca.crt         for the SuperLink and for every site
        ca.key         signs; stays with the coordinator, best off-line
        server.pem     the SuperLink's certificate (and the CA's); its names and addresses as SANs
        server.key
        keys/NAME      the site's private key, which proves to the SuperLink who it is
        keys/NAME.pub  for `flwr supernode register`

Flower reads node keys in OpenSSH's format, as `ssh-keygen -t ecdsa -b 384` writes them.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fednoro.core.files import disk_errors
from fednoro.core.types import UserError

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
        load_pem_private_key,
    )
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as error:
    raise UserError("certificates need the extra flower: pip install 'fednoro[flower]'") from error

CA_DAYS = 3650
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = re.compile(rf"(?=.{{1,253}}$)(\*\.)?({_LABEL}\.)*{_LABEL}")


@dataclass(frozen=True)
class Certificates:
    """Where everything lies, and until when it is valid."""

    ca: Path
    ca_key: Path
    server: Path
    server_key: Path
    sites: Mapping[str, Path]  # the private keys; the public ones end in .pub
    expires: datetime  # the server's certificate
    ca_expires: datetime
    new_files: tuple[Path, ...]  # what is new

    def public_key(self, site: str) -> Path:
        return public_key_of(self.sites[site])


def public_key_of(key: Path) -> Path:
    """`keys/a` → `keys/a.pub`."""
    return key.with_name(f"{key.name}.pub")


def make(
    folder: Path | str,
    hosts: Sequence[str] = (),
    sites: Sequence[str] = (),
    days: int = 365,
    force: bool = False,
) -> Certificates:
    """Makes what is not there yet; what is there is kept, so that a site can be added later.

    Args:
        folder: where it all goes.
        hosts: names and IP addresses under which sites reach the SuperLink; needed
            when its certificate is made.
        sites: names of sites to make key pairs for.
        days: how long the server's certificate is valid.
        force: make the server's certificate (if hosts are given) and the named sites'
            keys anew. The CA always stays.
    """
    folder = Path(folder).expanduser()
    _check(hosts, sites, days)
    authority = _Authority(folder)
    server, server_key = folder / "server.pem", folder / "server.key"
    _refuse_half_pairs([(authority.certificate_file, authority.key_file), (server, server_key)])
    keys = {site: folder / "keys" / site for site in sites}
    if not force:
        _refuse_existing_keys(keys)
    if not server.exists() and not hosts:
        raise UserError(
            "the SuperLink's certificate needs a name: "
            "give --host NAME or --host IP, one for each address"
        )
    new_files: list[Path] = []
    with disk_errors(folder):
        (folder / "keys").mkdir(parents=True, exist_ok=True)
    if not authority.certificate_file.exists():
        new_files += authority.create(max(CA_DAYS, days + 1))
    if hosts and (force or not server.exists()):
        new_files += authority.issue(server, server_key, hosts, days)
    elif hosts and set(names_in(load_certificate(server))) != {_normalise(host) for host in hosts}:
        names = ", ".join(names_in(load_certificate(server)))
        raise UserError(
            f"{server} is for {names}: say --force to make it anew for {', '.join(hosts)}"
        )
    for key in keys.values():
        new_files += _make_node_key(key)
    site_keys = {
        path.name: path for path in sorted((folder / "keys").iterdir()) if path.suffix != ".pub"
    }
    return Certificates(
        authority.certificate_file,
        authority.key_file,
        server,
        server_key,
        site_keys,
        load_certificate(server).not_valid_after_utc,
        load_certificate(authority.certificate_file).not_valid_after_utc,
        tuple(new_files),
    )


class _Authority:
    """The federation's own CA."""

    def __init__(self, folder: Path) -> None:
        self.certificate_file, self.key_file = folder / "ca.crt", folder / "ca.key"

    def create(self, days: int) -> list[Path]:
        key = _new_key()
        name = _common_name("fednoro federation CA")
        begin = _today()
        public = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin)
            .not_valid_after(begin + timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .add_extension(public, critical=False)
            .sign(key, hashes.SHA384())
        )
        write_private(self.key_file, _key_pem(key))
        _write(self.certificate_file, _certificate_pem(certificate))
        return [self.certificate_file, self.key_file]

    def issue(self, file: Path, key_file: Path, hosts: Sequence[str], days: int) -> list[Path]:
        ca, signer = load_certificate(self.certificate_file), self._load_key()
        begin, end = _today(), _today() + timedelta(days=days)
        if ca.not_valid_after_utc < end:
            raise UserError(
                f"{self.certificate_file} expires on {ca.not_valid_after_utc:%Y-%m-%d}, before a "
                f"certificate of {days} days would: use fewer --days, or make a new CA elsewhere "
                "and give every site its ca.crt"
            )
        key = _new_key()
        certificate = (
            x509.CertificateBuilder()
            .subject_name(_common_name("fednoro SuperLink"))
            .issuer_name(ca.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin)
            .not_valid_after(end)
            .add_extension(
                x509.SubjectAlternativeName([_general_name(host) for host in hosts]), critical=False
            )
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()),
                critical=False,
            )
            .sign(signer, hashes.SHA384())
        )
        write_private(key_file, _key_pem(key))
        _write(file, _certificate_pem(certificate) + _certificate_pem(ca))
        return [file, key_file]

    def _load_key(self) -> ec.EllipticCurvePrivateKey:
        try:
            key = load_pem_private_key(self.key_file.read_bytes(), None)
        except (OSError, ValueError, TypeError) as error:
            raise UserError(
                f"{self.key_file} cannot be read as the CA's private key: {error}"
            ) from error
        certificate = load_certificate(self.certificate_file)
        if (
            not isinstance(key, ec.EllipticCurvePrivateKey)
            or key.public_key() != certificate.public_key()
        ):
            raise UserError(
                f"{self.key_file} does not belong to {self.certificate_file}: "
                "put the right pair there"
            )
        return key


def load_certificate(file: Path) -> x509.Certificate:
    """The first certificate of a PEM file."""
    try:
        return x509.load_pem_x509_certificate(file.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"{file} is not a certificate in PEM format: {error}") from error


def names_in(certificate: x509.Certificate) -> list[str]:
    """The names and addresses that a certificate is for."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [
        *names.get_values_for_type(x509.DNSName),
        *map(str, names.get_values_for_type(x509.IPAddress)),
    ]


def write_private(file: Path, content: bytes) -> None:
    """Writes a file that nobody else could read at any moment."""
    temporary = file.with_name(f".{file.name}.tmp")
    with disk_errors(file):
        temporary.unlink(missing_ok=True)
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as out:
            out.write(content)
        temporary.replace(file)


def _make_node_key(file: Path) -> list[Path]:
    key = _new_key()
    write_private(file, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    _write(public_key_of(file), public + f" {file.name}\n".encode())
    return [file, public_key_of(file)]


def _check(hosts: Sequence[str], sites: Sequence[str], days: int) -> None:
    if days < 1:
        raise UserError(f"--days must be at least 1, got {days}")
    for host in hosts:
        _normalise(host)
    for site in sites:
        if not _NAME.fullmatch(site) or site.endswith(".pub"):
            raise UserError(
                f"a site's name is letters, digits, dots, dashes and underscores, got {site!r}"
            )
    if len(set(sites)) != len(sites):
        raise UserError(f"--sites names a site twice: {', '.join(sites)}")


def _refuse_half_pairs(pairs: Iterable[tuple[Path, Path]]) -> None:
    for certificate, key in pairs:
        if certificate.exists() and not key.exists() and certificate.name == "server.pem":
            raise UserError(
                f"{certificate} is there without {key.name}: "
                f"put the key back, or delete {certificate}"
            )
        if key.exists() and not certificate.exists():
            raise UserError(
                f"{key} is there without {certificate.name}: put that back, or delete {key}"
            )


def _refuse_existing_keys(keys: Mapping[str, Path]) -> None:
    for site, key in keys.items():
        if key.exists():
            raise UserError(
                f"{key} exists already: "
                f"leave {site} out of --sites, or say --force to replace its key"
            )


def _normalise(host: str) -> str:
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        if not _HOST.fullmatch(host) or re.fullmatch(r"[\d.]+", host):
            raise UserError(
                f"--host must be a DNS name or an IP address, without a port; got {host!r}"
            ) from None
        return host.lower()


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(_normalise(host))


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP384R1())


def _common_name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _usage(signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _today() -> datetime:
    # An hour back: a site's clock may be a little behind.
    return datetime.now(UTC).replace(microsecond=0) - timedelta(hours=1)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _certificate_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(Encoding.PEM)


def _write(file: Path, content: bytes) -> None:
    with disk_errors(file):
        file.write_bytes(content)
