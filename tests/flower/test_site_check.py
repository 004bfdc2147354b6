"""`fednoro flower site check`: every fault of a site is found, named and given a
remedy; a sound site passes.
"""

from __future__ import annotations

import http.server
import json
import shutil
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

pytest.importorskip("flwr")

import typer
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from typer.testing import CliRunner

from fednoro.cli.flower_setup import site as commands
from fednoro.flower.ops import certificates, inspect_site
from fednoro.flower.ops.certificates import Certificates, make, write_private
from fednoro.flower.ops.check_result import Check
from fednoro.flower.ops.site_check import check_site

CLASSES = ("bcc", "mel", "nev")
Serve = Callable[..., AbstractContextManager[str]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make(tmp_path_factory.mktemp("certificates"), ("localhost", "127.0.0.1"), ("north",))


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8, 9 and 10 images of three classes."""
    root, rng = tmp_path_factory.mktemp("data") / "images", np.random.default_rng(0)
    for number, name in enumerate(CLASSES):
        (root / name).mkdir(parents=True)
        for i in range(8 + number):
            pixels = rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i}.png")
    return root


@contextmanager
def superlink(ours: Certificates, ahead: float = 0.0, speaks_tls: bool = True) -> Iterator[str]:
    """Something that answers as a SuperLink does: TLS, HTTP and the time, which may be wrong."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(404)
            self.end_headers()

        def date_time_string(self, timestamp: float | None = None) -> str:
            return format_datetime(datetime.now(UTC) + timedelta(seconds=ahead), usegmt=True)

        def log_message(self, *_: Any) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        def handle_error(self, *_: Any) -> None:  # clients that do not like our certificate
            pass

    server = Server(("127.0.0.1", 0), Handler)
    if speaks_tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(ours.server, ours.server_key)
        server.socket = context.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def settings(tmp_path: Path, images: Path) -> Callable[..., Path]:
    """Writes a sound site.yaml, or one with some things otherwise."""

    def write(data: dict[str, Any] | None = None, **others: Any) -> Path:
        source = {
            "name": "folder",
            "path": str(images),
            "size": 16,
            "cache": str(tmp_path / "cache"),
            **(data or {}),
        }
        tree = {"data": source, "memory": str(tmp_path / "memory"), "device": "cpu", **others}
        file = tmp_path / "site.yaml"
        file.write_text(yaml.safe_dump(tree), encoding="utf-8")
        return file

    return write


def lines(checks: Iterator[Check], name: str) -> list[tuple[str, str]]:
    return [
        (check.status, f"{check.message} → {check.remedy}")
        for check in checks
        if check.name == name
    ]


def only(checks: Iterator[Check], name: str) -> tuple[str, str]:
    (line,) = lines(checks, name)
    return line


def test_a_sound_site_passes_every_check_and_nothing_is_left_behind(
    settings: Callable[..., Path], made: Certificates, tmp_path: Path
) -> None:
    file = settings()
    with superlink(made) as address:
        found = list(
            check_site(
                file,
                superlink=address,
                root_certificates=made.ca,
                key=made.sites["north"],
                classes=CLASSES,
                run_config="digits",
            )
        )
    assert [(check.name, check.status) for check in found if check.status != "ok"] == []
    assert {check.name for check in found} == {
        "packages",
        "site.yaml",
        "disk",
        "device",
        "data",
        "classes",
        "labels",
        "memory",
        "ca",
        "key",
        "connection",
        "tls",
        "clock",
    }
    assert "27 images of 16×16×3" in " ".join(check.message for check in found)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["site.yaml"]


# Data and labels


def test_all_images_are_decoded_when_asked(settings: Callable[..., Path], tmp_path: Path) -> None:
    assert only(check_site(settings(), full=True), "data")[0] == "ok"
    assert list((tmp_path / "cache").glob("images-*/manifest.json"))


@pytest.mark.parametrize("full", [False, True])
def test_images_that_cannot_be_read_are_named(
    tmp_path: Path, settings: Callable[..., Path], full: bool
) -> None:
    root, rng = tmp_path / "images", np.random.default_rng(1)
    for name in ("a", "b"):
        (root / name).mkdir(parents=True)
        for i in range(6):
            Image.fromarray(rng.integers(0, 256, (9, 9), dtype=np.uint8)).save(
                root / name / f"{i}.png"
            )
    (root / "a" / "torn.png").write_bytes((root / "a" / "0.png").read_bytes()[:50])
    (root / "b" / "notes.txt").write_text("x")
    found = lines(check_site(settings({"path": str(root)}), full=full), "data")
    assert [status for status, _ in found] == ["warning", "warning"]
    assert "a/torn.png" in found[0][1] and "left out otherwise" in found[0][1]
    assert "b/notes.txt" in found[1][1] and "torn" not in found[1][1]


def test_mostly_broken_images_fail(tmp_path: Path, settings: Callable[..., Path]) -> None:
    for name in ("a", "b"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(3):
            (tmp_path / "images" / name / f"{i}.jpg").write_bytes(b"no image")
    status, line = only(check_site(settings({"path": str(tmp_path / "images")})), "data")
    assert status == "failed" and "6 could not be" in line and "export the images again" in line


def test_missing_data_fails_and_the_rest_is_still_checked(
    settings: Callable[..., Path], made: Certificates, tmp_path: Path
) -> None:
    found = list(
        check_site(settings({"path": str(tmp_path / "nowhere")}), root_certificates=made.ca)
    )
    assert (
        only(iter(found), "data")[0] == "failed"
        and "does not exist" in only(iter(found), "data")[1]
    )
    assert only(iter(found), "ca")[0] == "ok"
    assert not lines(iter(found), "labels")


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (("mel", "bcc", "nev"), "the order differs"),
        (("bcc", "mel", "nev", "scc"), "scc not among the classes here"),
        (("bcc", "mel"), "the federation has no class nev"),
    ],
)
def test_class_names_must_be_the_federations_in_its_order(
    settings: Callable[..., Path], wanted: tuple[str, ...], words: str
) -> None:
    status, line = only(check_site(settings(), classes=wanted), "classes")
    assert (
        status == "failed"
        and words in line
        and f"data.classes in site.yaml to [{', '.join(wanted)}]" in line
    )


def test_classes_come_from_the_runs_configuration_too(
    settings: Callable[..., Path], tmp_path: Path
) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(
        "{preset: digits, data: {name: folder, path: /nowhere, classes: [bcc, mel, nev]}}"
    )
    assert only(check_site(settings(), run_config=str(run)), "classes")[0] == "ok"
    run.write_text("{preset: digits, data: {name: folder, path: /nowhere, classes: [bcc, mel]}}")
    assert only(check_site(settings(), run_config=str(run)), "classes")[0] == "failed"


def test_classes_that_are_missing_or_tiny_are_a_warning(
    settings: Callable[..., Path], images: Path
) -> None:
    rows = [
        "path,label",
        *(f"nev/{i}.png,nev" for i in range(9)),
        *(f"mel/{i}.png,mel" for i in range(3)),
    ]
    (images.parent / "few.csv").write_text("\n".join(rows))
    data = {"csv": str(images.parent / "few.csv"), "classes": list(CLASSES)}
    found = lines(check_site(settings(data), classes=CLASSES), "labels")
    assert [status for status, _ in found] == ["warning", "warning"]
    assert "no image of bcc" in found[0][1] and "fewer than 5 images of mel (3)" in found[1][1]


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        ({"min_count": 9}, "warning", "losses of bcc are withheld"),
        ({"min_count": 11}, "failed", "could never be judged"),
        ({"min_count": 8}, "ok", "losses of all 3 classes are sent"),
    ],
)
def test_what_would_be_withheld_is_told(
    settings: Callable[..., Path], options: dict[str, Any], status: str, words: str
) -> None:
    found = only(check_site(settings(**options)), "privacy")
    assert found[0] == status and words in found[1]


def test_noise_that_drowns_the_losses_is_a_warning(settings: Callable[..., Path]) -> None:
    loud = lines(check_site(settings(score_epsilon=0.1)), "privacy")
    assert loud[-1][0] == "warning" and "by 125% of the range" in loud[-1][1]
    assert [status for status, _ in lines(check_site(settings(score_epsilon=5.0)), "privacy")] == [
        "ok"
    ]


def test_site_is_told_whether_it_takes_part_in_audits(settings: Callable[..., Path]) -> None:
    no, yes = (
        "this site takes no part in audits",
        "this site takes part in audits: sums and counts are sent",
    )
    for options, words in (
        ({"min_count": 1}, no),
        ({"min_count": 1, "audit": True}, yes),
        ({"audit": False}, no),
    ):
        status, line = only(check_site(settings(**options)), "audit")
        assert status == "ok" and line.startswith(words)


# Disk, memory, device, packages, settings


def test_a_cache_that_does_not_fit_fails(
    settings: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = inspect_site.shutil.disk_usage("/")
    monkeypatch.setattr(inspect_site.shutil, "disk_usage", lambda _: usage._replace(free=10_000))
    found = lines(check_site(settings()), "disk")
    assert [status for status, _ in found] == ["failed", "failed"]
    assert "memory folder" in found[0][1] and "image cache needs" in found[1][1]


@pytest.mark.parametrize("place", ["memory", "cache"])
def test_folders_that_cannot_be_written_fail(
    settings: Callable[..., Path], tmp_path: Path, place: str
) -> None:
    (tmp_path / "a-file").write_text("in the way")
    blocked = str(tmp_path / "a-file" / "below")
    file = settings(memory=blocked) if place == "memory" else settings({"cache": blocked})
    found = [line for status, line in lines(check_site(file), "disk") if status == "failed"]
    assert len(found) == 1 and "a-file is not a folder" in found[0] and "site.yaml" in found[0]


def test_a_model_that_does_not_fit_fails(
    settings: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspect_site, "_available_memory", lambda: 1e8)
    status, line = only(check_site(settings(), run_config="digits"), "memory")
    assert status == "failed" and "100 MB are free" in line and "train.batch" in line


def test_larger_models_and_batches_are_estimated_to_take_more(tmp_path: Path) -> None:
    from fednoro.experiment.config.configuration import resolve
    from fednoro.flower.ops.inspect_site import Holding, _memory_estimate

    holding = Holding(CLASSES, dict.fromkeys(CLASSES, 9), (32, 32, 3))
    small = _memory_estimate(resolve("digits", ["model.width=4"]), holding)[0]
    big = _memory_estimate(resolve("digits", ["model=resnet18"]), holding)[0]
    batch = _memory_estimate(resolve("digits", ["train.batch=512"]), holding)[0]
    assert big > 4 * 8 * 11e6 > small
    assert batch > 10 * _memory_estimate(resolve("digits", ["train.batch=16"]), holding)[0]


def test_a_device_that_is_not_there_fails(settings: Callable[..., Path]) -> None:
    status, line = only(check_site(settings(device="cuda:77")), "device")
    assert status == "failed" and "device: auto" in line


def test_a_wrong_version_of_flower_fails(
    settings: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = inspect_site.version
    monkeypatch.setattr(
        inspect_site, "version", lambda name: "1.9.0" if name == "flwr" else real(name)
    )
    status, line = only(check_site(settings()), "packages")
    assert (
        status == "failed"
        and "flwr 1.9.0 is not <1.42,>=1.41" in line
        and "fednoro[flower]" in line
    )


@pytest.mark.parametrize(
    "text", ["", "data: [", "data: {name: nothing}", "memory: /tmp", "{data: digits, colour: red}"]
)
def test_a_faulty_site_yaml_fails(tmp_path: Path, text: str) -> None:
    (tmp_path / "site.yaml").write_text(text)
    status, line = only(check_site(tmp_path / "site.yaml"), "site.yaml")
    assert status == "failed" and "fednoro flower site init" in line


# The way to the SuperLink


def link(made: Certificates, site: Path, address: str, ca: Path | None = None) -> list[Check]:
    return list(
        check_site(
            site, superlink=address, root_certificates=ca or made.ca, key=made.sites["north"]
        )
    )


def test_nobody_at_the_port_fails(settings: Callable[..., Path], made: Certificates) -> None:
    with superlink(made) as address:
        pass
    status, line = only(iter(link(made, settings(), address)), "connection")
    assert status == "failed" and "refuses connections" in line


@pytest.mark.parametrize(
    "address", ["localhost", "https://localhost:80", "localhost:0", ":80", "localhost:http"]
)
def test_an_address_that_is_none_fails(
    settings: Callable[..., Path], made: Certificates, address: str
) -> None:
    status, line = only(iter(link(made, settings(), address)), "connection")
    assert status == "failed" and "is not HOST:PORT" in line


def test_a_name_that_nobody_knows_fails(settings: Callable[..., Path], made: Certificates) -> None:
    status, line = only(iter(link(made, settings(), "no-such-host.invalid:8000")), "connection")
    assert status == "failed" and "no-such-host.invalid" in line


def test_a_port_without_tls_fails(settings: Callable[..., Path], made: Certificates) -> None:
    with superlink(made, speaks_tls=False) as address:
        status, line = only(iter(link(made, settings(), address)), "tls")
    assert status == "failed" and "no TLS handshake" in line


def test_a_certificate_for_another_name_fails_and_its_names_are_told(
    settings: Callable[..., Path], made: Certificates, tmp_path: Path
) -> None:
    other = make(tmp_path / "other", ("link.example.org", "10.9.8.7"))
    with superlink(other) as address:
        status, line = only(iter(link(made, settings(), address, other.ca)), "tls")
    assert status == "failed" and "is for link.example.org, 10.9.8.7, not for 127.0.0.1" in line
    assert "fednoro flower certs DIR --host 127.0.0.1 --force" in line


def test_a_superlink_of_another_federation_fails(
    settings: Callable[..., Path], made: Certificates, tmp_path: Path
) -> None:
    other = make(tmp_path / "other", ("127.0.0.1",))
    with superlink(other) as address:
        status, line = only(iter(link(made, settings(), address)), "tls")
    assert status == "failed" and "not from this CA" in line


@pytest.mark.parametrize(
    ("age", "status", "words"),
    [
        (400, "failed", "has expired"),
        (350, "warning", "expires in 1"),
        (-3, "failed", "not valid yet"),
    ],
)
def test_a_certificate_out_of_its_time_is_noticed(
    settings: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    age: int,
    status: str,
    words: str,
) -> None:
    ca_from_a_year_ago = datetime.now(UTC) - timedelta(days=500)
    monkeypatch.setattr(certificates, "_today", lambda: ca_from_a_year_ago)
    old = make(tmp_path / "old", ("127.0.0.1",), ("north",))
    monkeypatch.setattr(certificates, "_today", lambda: datetime.now(UTC) - timedelta(days=age))
    old = make(tmp_path / "old", ("127.0.0.1",), days=365, force=True)
    with superlink(old) as address:
        found = link(old, settings(), address)
    assert only(iter(found), "tls")[0] == status and words in only(iter(found), "tls")[1]


@pytest.mark.parametrize(
    ("ahead", "status"), [(0, "ok"), (200, "ok"), (-30, "failed"), (400, "failed")]
)
def test_clocks_must_agree_as_far_as_flower_wants(
    settings: Callable[..., Path], made: Certificates, ahead: float, status: str
) -> None:
    with superlink(made, ahead) as address:
        found = only(iter(link(made, settings(), address)), "clock")
    assert found[0] == status
    if status == "failed":
        assert ("ahead of" if ahead < 0 else "behind") in found[1] and "NTP" in found[1]


def test_the_ca_file_must_be_a_ca_in_time(
    settings: Callable[..., Path],
    made: Certificates,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "not server.pem" in only(check_site(settings(), root_certificates=made.server), "ca")[1]
    assert (
        "cannot read"
        in only(check_site(settings(), root_certificates=tmp_path / "no.crt"), "ca")[1]
    )
    (tmp_path / "text.crt").write_text("hello")
    assert "PEM" in only(check_site(settings(), root_certificates=tmp_path / "text.crt"), "ca")[1]
    for days, status, words in [
        (4000, "failed", "expired on"),
        (3640, "warning", "expires on"),
        (-2, "failed", "clock"),
    ]:
        monkeypatch.setattr(
            certificates, "_today", lambda days=days: datetime.now(UTC) - timedelta(days=days)
        )
        ca = make(tmp_path / str(days), ("localhost",)).ca
        found = only(check_site(settings(), root_certificates=ca), "ca")
        assert found[0] == status and words in found[1]


# The key


def private(key: Any) -> bytes:
    content: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    return content


@pytest.mark.parametrize(
    ("content", "status", "words"),
    [
        (
            lambda: private(rsa.generate_private_key(65537, 2048)),
            "failed",
            "not an elliptic-curve key",
        ),
        (lambda: private(ec.generate_private_key(ec.SECP256R1())), "warning", "not P-384"),
        (lambda: b"ecdsa-sha2-nistp384 AAAA north", "failed", "is a public key"),
        (lambda: b"nonsense", "failed", "not an OpenSSH private key"),
    ],
)
def test_keys_that_flower_would_not_take_are_named(
    settings: Callable[..., Path],
    tmp_path: Path,
    content: Callable[[], bytes],
    status: str,
    words: str,
) -> None:
    write_private(tmp_path / "key", content())
    found = lines(check_site(settings(), key=tmp_path / "key"), "key")
    assert found[0][0] == status and words in found[0][1]


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not here")
@pytest.mark.parametrize(("passphrase", "status"), [("", "ok"), ("secret", "failed")])
def test_keys_made_by_ssh_keygen_are_taken_unless_they_have_a_passphrase(
    settings: Callable[..., Path], tmp_path: Path, passphrase: str, status: str
) -> None:
    make_key = [
        "ssh-keygen",
        "-q",
        "-t",
        "ecdsa",
        "-b",
        "384",
        "-N",
        passphrase,
        "-f",
        str(tmp_path / "key"),
    ]
    subprocess.run(make_key, check=True)
    found = only(check_site(settings(), key=tmp_path / "key"), "key")
    assert found[0] == status
    assert ("has a passphrase" if passphrase else "key.pub") in found[1]


def test_a_key_that_others_can_read_fails(settings: Callable[..., Path], tmp_path: Path) -> None:
    write_private(tmp_path / "key", private(ec.generate_private_key(ec.SECP384R1())))
    assert only(check_site(settings(), key=tmp_path / "key"), "key")[0] == "ok"
    (tmp_path / "key").chmod(0o640)
    status, line = only(check_site(settings(), key=tmp_path / "key"), "key")
    assert status == "failed" and f"chmod 600 {tmp_path / 'key'}" in line
    assert only(check_site(settings(), key=tmp_path / "none"), "key")[0] == "failed"


# The command


def run(*arguments: str) -> Any:
    app = typer.Typer()
    app.add_typer(commands, name="site")
    return CliRunner().invoke(app, ["site", *arguments])


def test_the_command_prints_a_line_each_and_ends_with_0_or_1(
    settings: Callable[..., Path], tmp_path: Path
) -> None:
    done = run("check", str(settings()), "--classes", "bcc, mel, nev")
    assert done.exit_code == 0 and done.output.splitlines()[-1] == "ready"
    assert "ok      classes: the federation's 3" in done.output
    done = run("check", str(settings()), "--classes", "a,b,c")
    assert (
        done.exit_code == 1
        and "failed  classes: the federation has no class bcc, mel, nev" in done.output
    )
    assert done.output.splitlines()[-1] == "1 to mend before this site can take part"


def test_the_command_speaks_json(settings: Callable[..., Path]) -> None:
    done = run("check", str(settings()), "--json", "--superlink", "nonsense")
    told = json.loads(done.output)
    assert done.exit_code == 1 and told["ok"] is False
    assert {"name", "status", "message", "remedy"} == set(told["checks"][0])
    assert [c["name"] for c in told["checks"] if c["status"] == "failed"] == ["connection"]
