"""Configurations: what resolves, what comes back from a dump, and what every mistake says."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fednoro.core.training import Augment
from fednoro.core.types import FedNoRoWarning, UserError
from fednoro.data.noise import HIDN, NOISES, Symmetric
from fednoro.data.partition import PARTITIONS
from fednoro.data.sources import SOURCES
from fednoro.data.split import Split
from fednoro.experiment.config.configuration import (
    REGISTRIES,
    Config,
    dump,
    presets,
    resolve,
    section_name,
    seeds,
)
from fednoro.methods import METHODS, FedLA, FedNoRo
from fednoro.models import Cnn, Factory, Resnet18

FOLDER_PRESETS = sorted(set(presets()) - {"digits"})
NEEDED = {  # options without a default
    "noise.transition": ["noise.matrix=[[0.9, 0.1], [0.2, 0.8]]"],
    "noise.from_file": ["noise.path=labels.csv"],
    **{
        f"data.{name}": ["data.path=images"]
        for name in SOURCES
        if name not in ("digits", "synthetic", "sites")
    },
}

OWN = "One of your own is named module:Class"


def with_data(preset: str, *overrides: str) -> Config:
    return resolve(
        preset, [*(["data.path=images"] if preset in FOLDER_PRESETS else []), *overrides]
    )


def mistake(source: Any = "digits", *overrides: str) -> str:
    """The one line that a wrong configuration gives."""
    with pytest.raises(UserError) as caught:
        resolve(source, overrides)
    line = str(caught.value)
    assert line and len(line.splitlines()) == 1
    return line


def written(folder: Path, text: str, name: str = "my.yaml") -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


# Presets


def test_the_presets_are_those_that_were_promised() -> None:
    assert list(presets()) == ["digits", "ham10000", "ich", "isic2019"]
    assert all(line and not line.startswith("#") for line in presets().values())


def test_digits_is_the_default_and_needs_nothing() -> None:
    assert resolve() == resolve("digits")
    assert (
        section_name(resolve(), "data") == "digits"
        and section_name(resolve(), "method") == "fednoro"
    )


@pytest.mark.parametrize("preset", FOLDER_PRESETS)
def test_presets_for_images_on_disk_want_to_know_where_they_are(preset: str) -> None:
    example = {"ham10000": "~/HAM10000", "isic2019": "~/ISIC2019", "ich": "~/rsna"}[preset]
    assert mistake(preset) == f"data.path is required, as in data.path={example}"
    assert with_data(preset).data.path == "images"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("preset", "p", "alpha", "flips", "rounds", "epochs", "warmup", "size"),
    [
        ("ich", 0.9, 2.0, (0.3, 0.5), 100, 5, 10, 128),
        ("isic2019", 0.99, 1.5, (0.5, 0.7), 300, 1, 20, 224),
    ],
)
def test_the_papers_presets_hold_the_papers_settings(
    preset: str,
    p: float,
    alpha: float,
    flips: tuple[float, float],
    rounds: int,
    epochs: int,
    warmup: int,
    size: int,
) -> None:
    config = with_data(preset)
    assert config.split == Split(test=0.3, grouped=False)
    assert dataclasses.asdict(config.partition) == {"clients": 20, "p": p, "alpha": alpha}
    assert section_name(config, "partition") == "bernoulli_dirichlet"
    assert isinstance(config.noise, HIDN) and config.noise.rate == 0.4
    assert (config.noise.low, config.noise.high) == flips
    assert isinstance(config.model, Resnet18)
    assert config.data.size == size  # type: ignore[attr-defined]
    train = config.train
    assert (train.rounds, train.epochs, train.batch, train.lr, train.weight_decay) == (
        rounds,
        epochs,
        16,
        3e-4,
        5e-4,
    )
    assert (train.participation, train.failures) == (1.0, 0.0)
    assert train.augment == Augment(rotate=10, translate=0.02, flip=True)
    method = config.method
    assert isinstance(method, FedNoRo)
    assert (method.warmup, method.lam_max, method.temperature, method.behaviour) == (
        warmup,
        0.8,
        0.8,
        "paper",
    )


@pytest.mark.parametrize("preset", presets())
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("noise", NOISES)
def test_a_dumped_configuration_resolves_to_the_same_value(
    preset: str, method: str, noise: str, tmp_path: Path
) -> None:
    config = with_data(
        preset, f"method={method}", f"noise={noise}", *NEEDED.get(f"noise.{noise}", []), "seed=3"
    )
    again = resolve(written(tmp_path, dump(config)))
    assert again == config and dump(again) == dump(config)
    assert section_name(again, "noise") == noise and section_name(again, "method") == method
    assert resolve(yaml.safe_load(dump(config))) == config


@pytest.mark.parametrize(
    ("section", "name"),
    [(section, name) for section, registry in REGISTRIES.items() for name in registry],
)
def test_every_registered_part_survives_a_dump(section: str, name: str) -> None:
    needed = NEEDED.get(f"{section}.{name}", [])
    if name == "factory":
        needed = ["model.factory=mine:net", "model.options={depth: 3, names: [a, b]}"]
    config = resolve("digits", [f"{section}={name}", *needed])
    assert type(getattr(config, section)) is REGISTRIES[section][name]
    assert resolve(yaml.safe_load(dump(config))) == config


@given(
    lr=st.floats(1e-12, 10),
    decay=st.floats(0, 1),
    name=st.from_regex(r"[a-z_\- éλ][\w \-:#'\"]{0,10}", fullmatch=True),
)
@settings(max_examples=15, deadline=None)
def test_numbers_and_text_survive_a_dump_exactly(lr: float, decay: float, name: str) -> None:
    config = resolve(
        {
            **yaml.safe_load(dump(resolve())),
            "name": name,
            "train": {"lr": lr, "weight_decay": decay},
        }
    )
    assert (
        resolve(yaml.safe_load(dump(config))) == config
        and config.train.lr == lr
        and config.name == name
    )


# Choosing and overriding


def test_overrides_reach_every_level() -> None:
    config = resolve(
        "digits",
        ["seed=7", "train.rounds=20", "train.augment.rotate=5", "method.warmup=3", "noise.low=0.6"],
    )
    assert (config.seed, config.train.rounds, config.train.augment.rotate) == (7, 20, 5.0)
    assert config.method.warmup == 3  # type: ignore[attr-defined]
    assert config.noise == dataclasses.replace(resolve("digits").noise, low=0.6)


def test_numbers_may_be_written_as_people_write_them() -> None:
    assert resolve("digits", ["train.lr=3e-4"]).train.lr == 3e-4
    assert resolve("digits", ["train.lr=1"]).train.lr == 1.0
    assert resolve("digits", ["train.augment.flip=yes"]).train.augment.flip is True
    assert resolve("digits", ["method.ramp_end=null"]).method.ramp_end is None  # type: ignore[attr-defined]


def test_the_last_of_two_equal_overrides_wins() -> None:
    assert resolve("digits", ["seed=1", "seed=2"]).seed == 2


@pytest.mark.parametrize("choice", ["method=fedla", "method.name=fedla"])
def test_another_method_drops_the_former_ones_options(choice: str, tmp_path: Path) -> None:
    file = written(tmp_path, "preset: digits\nmethod: {name: fednoro, warmup: 3, lam_max: 0.5}\n")
    assert resolve(file, [choice]).method == FedLA()
    kept = resolve(file, ["method=fednoro"]).method
    assert kept == FedNoRo(warmup=3, lam_max=0.5)


@pytest.mark.parametrize("order", [1, -1])
def test_a_choice_and_its_options_may_come_in_either_order(order: int) -> None:
    overrides = ["method=fedla", "method.tau=2", "noise=symmetric", "noise.low=0.1"][::order]
    config = resolve("digits", overrides)
    assert config.method == FedLA(tau=2.0) and config.noise == Symmetric(low=0.1)


def test_the_table_of_methods_gives_each_method_its_own_options(tmp_path: Path) -> None:
    file = written(
        tmp_path, "preset: digits\nmethods:\n  fedla: {tau: 0.5}\n  fednoro: {lam_max: 0.3}\n"
    )
    warmup = resolve("digits").method.warmup  # type: ignore[attr-defined]
    assert warmup != FedNoRo().warmup, "the preset must say something for this test to see it kept"
    assert resolve(file).method == FedNoRo(warmup=warmup, lam_max=0.3)
    assert resolve(file, ["method=fedla"]).method == FedLA(tau=0.5)
    assert resolve(file, ["method=fedla", "method.tau=2"]).method == FedLA(tau=2.0)
    assert resolve(file, ["methods.fednoro.warmup=4"]).method == FedNoRo(warmup=4, lam_max=0.3)


def test_a_file_changes_only_what_it_says_of_its_preset(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        "preset: isic2019\nseed: 4\ndata: {path: images}\nnoise: {rate: 0.6}\n"
        "train: {epochs: 2, augment: {rotate: 5}}\n",
    )
    base, mine = with_data("isic2019"), resolve(file)
    assert mine == dataclasses.replace(
        base,
        seed=4,
        noise=dataclasses.replace(base.noise, rate=0.6),
        train=dataclasses.replace(
            base.train, epochs=2, augment=dataclasses.replace(base.train.augment, rotate=5)
        ),
    )


def test_a_file_may_choose_another_part_than_its_preset(tmp_path: Path) -> None:
    mine = resolve(
        written(
            tmp_path, "preset: digits\nnoise: symmetric\nmodel: {name: resnet18}\nmethod: fedavg\n"
        )
    )
    assert (mine.noise, mine.model, type(mine.method)) == (
        Symmetric(),
        Resnet18(),
        METHODS["fedavg"],
    )


def test_a_mapping_is_read_and_left_alone() -> None:
    given = {"preset": "digits", "train": {"rounds": 30}, "method": {"warmup": 2}}
    before = yaml.safe_dump(given)
    config = resolve(given, ["train.epochs=1", "method.lam_max=0.5", "data.imbalance=2"])
    assert (config.train.rounds, config.train.epochs) == (30, 1)
    assert config.method == FedNoRo(warmup=2, lam_max=0.5)
    assert yaml.safe_dump(given) == before
    proxy = MappingProxyType({"preset": "digits", "train": MappingProxyType({"epochs": 1})})
    assert resolve(proxy, ["train.rounds=30"]) == resolve(
        "digits", ["train.epochs=1", "train.rounds=30"]
    )


def test_an_empty_section_means_its_defaults(tmp_path: Path) -> None:
    parts = (
        "data: digits\npartition: iid\nnoise: none\nmodel: cnn\nmethod: "
        "fedavg\ntrain:\nsplit:\nmethods:\n"
    )
    assert resolve(written(tmp_path, parts)).train.rounds == 100
    assert resolve(written(tmp_path, parts)).split == Split()
    assert resolve(written(tmp_path, parts), ["train.rounds=3"]).train.rounds == 3


def test_a_network_of_ones_own() -> None:
    config = resolve("digits", ["model=my_module:factory", "model.options={depth: 3}"])
    assert config.model == Factory("my_module:factory", {"depth": 3})
    assert section_name(config, "model") == "my_module:factory"
    assert resolve(yaml.safe_load(dump(config))) == config
    assert resolve("digits", ["model=factory", "model.factory=my_module:factory"]).model == Factory(
        "my_module:factory"
    )
    assert resolve("digits", ["model=cnn"]).model == resolve("digits").model != Cnn()


# Mistakes


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("sead=3", "unknown key sead: did you mean seed?"),
        ("trian.rounds=3", "unknown key trian: did you mean train?"),
        ("train.round=3", "unknown key train.round: did you mean rounds?"),
        ("split.grups=3", "unknown key split.grups: did you mean grouped?"),
        ("train.augment.rotat=3", "unknown key train.augment.rotat: did you mean rotate?"),
        ("method.warm_up=3", "unknown key method.warm_up: did you mean warmup?"),
        ("noise.rat=0.3", "unknown key noise.rat: did you mean rate?"),
        ("data.imbalanse=3", "unknown key data.imbalanse: did you mean imbalance?"),
        ("partition.client=3", "unknown key partition.client: did you mean clients?"),
        ("model.wide=3", "unknown key model.wide: did you mean width?"),
        ("methods.fednoro.warmups=3", "unknown key methods.fednoro.warmups: did you mean warmup?"),
        ("methods.fedla.taw=3", "unknown key methods.fedla.taw: did you mean tau?"),
        ("methods.fedlaa.tau=3", "unknown key methods.fedlaa: did you mean fedla?"),
        ("model.xyzzy=1", "unknown key model.xyzzy: known are width"),
    ],
)
def test_an_unknown_key_is_named_with_the_likely_one(override: str, line: str) -> None:
    assert mistake("digits", override) == line


def test_an_unknown_key_is_found_wherever_it_is_written(tmp_path: Path) -> None:
    assert mistake(written(tmp_path, "preset: digits\ntrain: {augment: {rotat: 1}}\n")).startswith(
        "unknown key train.augment.rotat"
    )
    assert mistake(written(tmp_path, "preset: digits\n1: 2\n")).startswith(
        "unknown key 1: known are seed, name"
    )
    assert "train" in mistake(written(tmp_path, "preset: digits\ntrain: {1: 2}\n"))
    assert mistake("digits", "model=my_module:factory", "model.width=3").startswith(
        "unknown key model.width"
    )


@pytest.mark.parametrize(
    ("override", "named", "value"),
    [
        ("train.rounds=many", "train.rounds", "'many'"),
        ("train.rounds=5.5", "train.rounds", "5.5"),
        ("train.rounds=yes", "train.rounds", "True"),
        ("train.augment.rotate=true", "train.augment.rotate", "True"),
        ("method.ramp_end=on", "method.ramp_end", "True"),
        ("train.lr=fast", "train.lr", "'fast'"),
        ("train.lr=", "train.lr", "None"),
        ("train.augment.flip=3", "train.augment.flip", "3"),
        ("train.augment=3", "train.augment", "3"),
        ("train=3", "train", "3"),
        ("train=0", "train", "0"),
        ("split=0.3", "split", "0.3"),
        ("split.grouped=3", "split.grouped", "3"),
        ("split.test=true", "split.test", "True"),
        ("seed=one", "seed", "'one'"),
        ("out=3", "out", "3"),
        ("method.behaviour=poper", "method.behaviour", "'poper'"),
        ("method=[fedla]", "method", "['fedla']"),
        ("method=3", "method", "3"),
        ("methods=3", "methods", "3"),
        ("methods.fednoro=3", "methods.fednoro", "3"),
        ("noise=", "noise", "None"),
    ],
)
def test_a_wrong_type_is_named_with_its_value(override: str, named: str, value: str) -> None:
    line = mistake("digits", override)
    assert f"{named} " in line and line.endswith(f"got {value}")


def test_an_option_of_several_types_is_named_plainly() -> None:
    assert mistake("digits", "noise=transition", "noise.matrix=3").startswith(
        "noise.matrix should be"
    )


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ("split.test=0", "split.test must be in (0, 1), got 0.0"),
        ("split.validation=1", "split.validation must be in [0, 1), got 1.0"),
        ("seed=-1", "seed must be >= 0, got -1"),
        ("checkpoint_every=0", "checkpoint_every must be >= 1, got 0"),
        ("train.rounds=0", "train.rounds must be >= 1, got 0"),
        ("train.lr=.nan", "train.lr must be > 0, got nan"),
        ("train.lr=.inf", "train.lr must be > 0, got inf"),
        ("train.augment.translate=1", "train.augment.translate must be in [0, 1), got 1.0"),
        ("noise.rate=1.4", "noise.rate must be in [0, 1], got 1.4"),
        ("noise.low=0.9 noise.high=0.7", "noise.low must be <= noise.high, got 0.9 and 0.7"),
        ("methods.fednoro.lam_max=2", "method.lam_max must be in [0, 1], got 2.0"),
        (
            "method.warmup=60 train.rounds=60",
            "method.warmup must be below train.rounds (60), got 60: set either",
        ),
        (
            "method.ramp_end=3 method.warmup=5",
            "method.ramp_end must be at least method.warmup (5), got 3",
        ),
        ("name=a/b", "name must be a plain folder name, got 'a/b'"),
        ("name=a\\b", "name must be a plain folder name, got 'a\\\\b'"),
        ("name=..", "name must be a plain folder name, got '..'"),
        ("name=''", "name must be a plain folder name, got ''"),
    ],
)
def test_a_value_out_of_range_is_named_with_what_is_allowed(overrides: str, line: str) -> None:
    assert mistake("digits", *overrides.split()) == line


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("method=fednroo", f"unknown method 'fednroo': did you mean fednoro? {OWN}"),
        ("method.name=fednroo", f"unknown method 'fednroo': did you mean fednoro? {OWN}"),
        ("noise=xyzzy", f"unknown noise 'xyzzy': known are {', '.join(NOISES)}"),
        ("data=digit", "unknown data 'digit': did you mean digits?"),
        ("partition=xyzzy", f"unknown partition 'xyzzy': known are {', '.join(PARTITIONS)}"),
        ("model=resnet8", "unknown model 'resnet8': did you mean resnet18?"),
        ("method={name: [1]}", f"unknown method [1]: known are {', '.join(METHODS)}. {OWN}"),
        ("method=fedgce", f"unknown method 'fedgce': did you mean fedavg? {OWN}"),
    ],
)
def test_an_unknown_name_in_a_section_is_met_with_the_known_ones(override: str, line: str) -> None:
    assert mistake("digits", override) == line


def test_another_choices_option_is_said_to_be_that() -> None:
    kinds = "h_idn, symmetric, pair_flip, transition"
    about = f"unknown key noise.rate: noise none has no rate; it belongs to {kinds}"
    assert mistake("digits", "noise=none", "noise.rate=0.2") == about
    about = "unknown key partition.clients: partition by_column has no clients; it belongs to"
    assert mistake("digits", "partition=by_column", "partition.clients=3").startswith(about)
    assert mistake("digits", "noise=none", "noise.rat=0.2") == "unknown key noise.rat"


@pytest.mark.parametrize(
    "override", ["rounds", "=3", "train.=3", ".rounds=3", "train..rounds=3", ""]
)
def test_an_override_without_key_or_value_shows_what_one_looks_like(override: str) -> None:
    assert (
        mistake("digits", override)
        == f"override {override!r} must look like key=value, for example method.warmup=5"
    )


def test_an_override_below_something_that_is_no_section_says_so() -> None:
    assert (
        mistake({"preset": "digits", "seed": 1}, "seed.x=3")
        == "override 'seed.x=3': seed is not a section"
    )
    assert mistake("digits", "train.lr.x=3") == "override 'train.lr.x=3': lr is not a section"
    assert (
        mistake("digits", "train.rounds=[1")
        == "override 'train.rounds=[1': the value is not valid YAML"
    )


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.yaml")
    known = "(digits, ham10000, ich, isic2019)"
    assert mistake(missing) == f"{missing!r} is neither a preset {known} nor a file"
    assert (
        mistake("digitz")
        == f"'digitz' is neither a preset {known} nor a file: did you mean digits?"
    )
    assert "nor a file" in mistake(tmp_path)
    for content in (
        "a: [1\nb: 2",
        "a: b: c",
        "- {",
        "\tx: 1",
        "{[1, 2]: 3}",
        "x: !!python/object:os.system 1",
    ):
        assert "is not valid YAML" in mistake(written(tmp_path, content))
    for content in ("", "- 1\n- 2", "just text", "3", "null"):
        assert mistake(written(tmp_path, content)).endswith(
            "must be a mapping of sections, such as `method: fednoro`"
        )
    (tmp_path / "latin.yaml").write_bytes("name: \xe9".encode("latin-1"))
    assert "latin.yaml cannot be read" in mistake(tmp_path / "latin.yaml")


def test_presets_in_files_must_exist_and_cannot_go_round_in_circles(tmp_path: Path) -> None:
    assert mistake(written(tmp_path, "preset: digit\n")).endswith(
        "unknown preset 'digit': did you mean digits?"
    )
    own = written(tmp_path, f"preset: {tmp_path / 'my.yaml'}\n")
    assert "unknown preset" in mistake(own)
    assert "unknown preset" in mistake({"preset": ["digits"]})


def test_sections_that_are_missing_are_asked_for() -> None:
    assert (
        mistake({"data": "digits"})
        == f"partition has no name: choose one of {', '.join(PARTITIONS)}"
    )
    assert mistake({}) == f"data has no name: choose one of {', '.join(SOURCES)}"
    assert (
        mistake({"data": {"imbalance": 3}})
        == f"data has no name: choose one of {', '.join(SOURCES)}"
    )
    assert (
        mistake("digits", "noise=from_file")
        == "noise.path is required, as in noise.path=labels.csv"
    )


# Seeds


@pytest.mark.parametrize(
    ("given", "found", "rest"),
    [
        ([], [], []),
        (["seed=3"], [3], []),
        (["seed=0..2"], [0, 1, 2], []),
        (["a=1", "seed=1,4,7", "b=2"], [1, 4, 7], ["a=1", "b=2"]),
        (["seed=0..1,5..6,9"], [0, 1, 5, 6, 9], []),
        (["seed=2..2"], [2], []),
        (["seed=1", "seed=2..3"], [2, 3], []),
        (["noise.seed=1..2"], [], ["noise.seed=1..2"]),
    ],
)
def test_seeds_are_a_number_a_list_or_a_range(
    given: list[str], found: list[int], rest: list[str]
) -> None:
    assert seeds(given) == (found, rest)


@pytest.mark.parametrize(
    "text", ["", "a", "0..", "..3", "1,,2", "0...3", "1.5", "3..1", "-1", "-2..1", "1,1", "0..2,1"]
)
def test_seeds_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"^seed must .*got '") as caught:
        seeds([f"seed={text}"])
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("choice", ["method=fedla", "method.name=fedla"])
def test_a_choice_and_its_option_may_come_in_either_order(choice: str) -> None:
    for overrides in ([choice, "method.tau=2"], ["method.tau=2", choice]):
        assert resolve("digits", overrides).method == METHODS["fedla"](tau=2.0)


def test_one_value_for_a_list_is_met_with_the_list_that_was_meant() -> None:
    said = mistake("digits", "method=fednoro-plus", "method.noisy=3")
    assert said == "method.noisy must be a list, as in method.noisy=[3]; got 3"


def test_a_client_that_is_named_twice_is_refused() -> None:
    said = mistake("digits", "method=fednoro-plus", "method.noisy=[0, 2, 0]")
    assert said == "method.noisy must name each client once, got 0 more often"


OWN_IMAGES = "data={name: folder, path: images}"


@pytest.mark.parametrize(
    "overrides", [(OWN_IMAGES,), ("data=prepared", "data.path=cache", "seed=3")]
)
def test_artificial_noise_that_only_the_preset_asks_for_on_own_labels_is_warned_about(
    overrides: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text("preset: digits\nseed: 1\n")
    for source in ("digits", "ham10000", tmp_path / "mine.yaml", {"preset": "digits"}):
        with pytest.warns(FedNoRoWarning) as said:
            resolve(source, overrides)
        assert [str(one.message) for one in said] == [
            "noise h_idn changes your own labels: noise=none keeps them"
        ]


def test_noise_that_was_asked_for_or_is_none_is_not_warned_about(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("preset: digits\nnoise: {name: h_idn}\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FedNoRoWarning)
        resolve("digits")
        for asked in (
            "noise=none",
            "noise=symmetric",
            "noise.rate=0.2",
            "noise={name: from_file, path: labels.csv}",
        ):
            resolve("digits", [OWN_IMAGES, asked])
        resolve(tmp_path / "mine.yaml", [OWN_IMAGES])
        resolve(
            {"preset": "digits", "noise": "h_idn", "data": {"name": "folder", "path": "images"}}
        )
