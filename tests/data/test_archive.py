"""A folder and a zip look the same, and neither leads outside, in
circles or to the end of memory.
"""

from __future__ import annotations

import os
import pickle
import stat
import struct
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fednoro.core.types import FedNoRoWarning, UserError
from fednoro.data.cache import archive
from fednoro.data.cache.archive import Tree, open_tree

FILES = {
    "a/1.jpg": b"one" * 99,
    "a/b/2.png": b"two",
    "Ä 患者.csv": b"x,y\n",
    "empty": b"",
    "z" * 250: b"long",
}
HIDDEN = (".DS_Store", "a/._1.jpg", ".git/config", "__MACOSX/a/._1.jpg", "__MACOSX/a/2.jpg")


def folder(path: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def packed(path: Path, files: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as file:
        file.mkdir("folder")
        for name, data in files.items():
            file.writestr(name, data)
    return path


@pytest.fixture(params=["folder", "zip", "stored zip"])
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> Tree:
    files = FILES | dict.fromkeys(HIDDEN, b"hidden")
    if request.param == "folder":
        return open_tree(folder(tmp_path / "images", files))
    method = zipfile.ZIP_STORED if request.param == "stored zip" else zipfile.ZIP_DEFLATED
    return open_tree(packed(tmp_path / "images.zip", files, method))


def test_names_are_sorted_and_without_hidden_files(tree: Tree) -> None:
    assert tree.names == tuple(sorted(FILES))


def test_bytes_and_sizes_are_those_of_the_files(tree: Tree) -> None:
    for name, data in FILES.items():
        assert tree.read(name) == tree.member(name).read() == data
        assert (tree.stamp(name) or ())[0] == len(data)


def test_what_is_not_listed_is_not_read(tree: Tree) -> None:
    for name in ("nothing", "a", ".DS_Store", "../secret", "/etc/passwd", "x" * 5000, "a/../empty"):
        assert tree.stamp(name) is None
        with pytest.raises(UserError, match="no such file"):
            tree.read(name)


def test_a_tree_and_its_members_can_be_sent_to_other_processes_and_read_by_threads(
    tree: Tree,
) -> None:
    copy: Tree = pickle.loads(pickle.dumps(tree))
    assert (copy.path, copy.names) == (tree.path, tree.names)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(copy.read, list(FILES) * 20)) == list(FILES.values()) * 20
    member = pickle.dumps(tree.member("a/1.jpg"))
    assert len(member) < 400
    assert pickle.loads(member).read() == FILES["a/1.jpg"]


def test_a_changed_file_has_another_stamp(tmp_path: Path) -> None:
    path = folder(tmp_path / "images", FILES)
    before = open_tree(path).stamp("a/1.jpg")
    os.utime(path / "a/1.jpg", ns=(5, 5))
    assert open_tree(path).stamp("a/1.jpg") != before
    assert open_tree(packed(tmp_path / "1.zip", {"x": b"ab"})).stamp("x") != open_tree(
        packed(tmp_path / "2.zip", {"x": b"ba"})
    ).stamp("x")


def test_a_path_that_is_no_tree_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.path .*nowhere does not exist"):
        open_tree(tmp_path / "nowhere")
    (tmp_path / "file").write_bytes(b"PK, or nearly")
    with pytest.raises(UserError, match=r"data\.path .*file is neither a folder nor a zip"):
        open_tree(tmp_path / "file")
    whole = packed(tmp_path / "whole.zip", FILES).read_bytes()
    (tmp_path / "half.zip").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="or one that was cut off"):
        open_tree(tmp_path / "half.zip")
    (tmp_path / "odd.zip").write_bytes(whole.replace(b"PK\1\2", rb"PK\9\9", 1))
    with pytest.raises(UserError, match=r"odd\.zip cannot be read"):
        open_tree(tmp_path / "odd.zip")


# Links


@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege there")
def test_links_are_followed_to_files_inside_only(tmp_path: Path) -> None:
    path = folder(tmp_path / "images", FILES)
    outside = folder(tmp_path / "outside", {"secret": b"x"})
    (path / "inside").symlink_to("a/1.jpg")
    assert open_tree(path).read("inside") == FILES["a/1.jpg"]
    (path / "loop").symlink_to(path)
    (path / "a" / "round").symlink_to("round")
    (path / "out").symlink_to(outside)
    (path / "file").symlink_to(outside / "secret")
    (path / "nowhere").symlink_to("nothing")
    with pytest.warns(
        FedNoRoWarning, match=r"5 links in .*images are not followed.*; first: a/round$"
    ):
        tree = open_tree(path)
    assert tree.names == tuple(sorted([*FILES, "inside"]))
    assert open_tree(path / "loop").path == path  # the folder itself may be a link


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX has them")
def test_pipes_and_sockets_are_no_files(tmp_path: Path) -> None:
    path = folder(tmp_path / "images", FILES)
    os.mkfifo(path / "pipe.jpg")  # reading it would wait for ever
    assert open_tree(path).names == tuple(sorted(FILES))


# Hostile zips


@pytest.mark.parametrize(
    "name",
    [
        "../x.jpg",
        "a/../../x.jpg",
        "/etc/x.jpg",
        "C:/x.jpg",
        "c:x.jpg",
        "..\\x.jpg",
        "a\\..\\..\\x",
        "\\\\host\\x",
    ],
)
def test_a_zip_that_reaches_outside_itself_is_refused(tmp_path: Path, name: str) -> None:
    path = packed(tmp_path / "evil.zip", {"good.jpg": b"x", name: b"x"})
    with pytest.raises(UserError, match=r"evil\.zip holds .*x.*, which leads outside it"):
        open_tree(path)


def test_links_and_encrypted_files_in_a_zip_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "link.zip", "w") as file:
        info = zipfile.ZipInfo("link.jpg")
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        file.writestr(info, "/etc/passwd")
    with pytest.raises(UserError, match=r"holds the link 'link\.jpg'"):
        open_tree(tmp_path / "link.zip")
    data = bytearray(packed(tmp_path / "locked.zip", {"x.jpg": b"x"}).read_bytes())
    data[data.rindex(b"PK\1\2") + 8] |= 1
    (tmp_path / "locked.zip").write_bytes(data)
    with pytest.raises(UserError, match=r"locked\.zip is encrypted \('x\.jpg'\): unpack it"):
        open_tree(tmp_path / "locked.zip")


def test_a_file_that_unpacks_enormously_is_not_unpacked(tmp_path: Path) -> None:
    tree = open_tree(packed(tmp_path / "bomb.zip", {"bomb.jpg": bytes(20 * 2**20), "x.jpg": b"x"}))
    with pytest.raises(UserError, match=r"^unpacks to 20\.0 MiB from 0\.0 MiB$"):
        tree.read("bomb.jpg")
    assert tree.read("x.jpg") == b"x"


def test_a_bomb_that_lies_about_its_size_is_cut_short(tmp_path: Path) -> None:
    path = packed(tmp_path / "bomb.zip", {"bomb.jpg": bytes(64 * 2**20)})
    data = path.read_bytes()
    path.write_bytes(data.replace(struct.pack("<I", 64 * 2**20), struct.pack("<I", 1000)))
    with pytest.raises(UserError, match="the zip is damaged here"):
        open_tree(path).read("bomb.jpg")


def test_no_file_is_read_beyond_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "LIMIT", 1000)
    files = {"small.jpg": os.urandom(1000), "large.jpg": os.urandom(1001)}
    for tree in (
        open_tree(folder(tmp_path / "images", files)),
        open_tree(packed(tmp_path / "x.zip", files)),
    ):
        assert tree.read("small.jpg") == files["small.jpg"]
        with pytest.raises(UserError, match=r"has more than 0\.0 MiB|unpacks to 0\.0 MiB"):
            tree.read("large.jpg")


def test_a_black_image_packs_well_and_is_no_bomb(tmp_path: Path) -> None:
    assert open_tree(packed(tmp_path / "x.zip", {"black.dcm": bytes(2**20)})).read(
        "black.dcm"
    ) == bytes(2**20)


def test_damage_inside_a_zip_is_a_reason_not_a_crash(tmp_path: Path) -> None:
    noise = os.urandom(5000)
    path = packed(tmp_path / "x.zip", {"x.jpg": noise, "y.jpg": b"y"}, zipfile.ZIP_STORED)
    whole = path.read_bytes()
    for damaged in (
        whole.replace(noise, noise[:-1] + bytes([noise[-1] ^ 1])),
        whole.replace(b"PK\3\4", b"PK\0\0"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="the zip is damaged here"):
            open_tree(path).read("x.jpg")
    path = packed(tmp_path / "y.zip", {"x.jpg": b"abc" * 999})
    data = bytearray(path.read_bytes())
    start = data.index(b"x.jpg") + 5
    data[start : start + 9] = b"\xff" * 9
    path.write_bytes(data)
    with pytest.raises(UserError, match="the zip is damaged here"):
        open_tree(path).read("x.jpg")
    with pytest.raises(UserError, match=r"packed by a method that is not supported \(14\)"):
        open_tree(packed(tmp_path / "z.zip", {"x.jpg": b"x"}, zipfile.ZIP_LZMA)).read("x.jpg")
