"""Whether a site is ready, before anything is sent:
each inspection in turn, as lines or as JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from fednoro.core.types import UserError
from fednoro.experiment.config.configuration import Config, resolve
from fednoro.flower.ops.check_result import Check, failed, ok, run_inspection, warning
from fednoro.flower.ops.inspect_link import inspect_ca, inspect_connection, inspect_key
from fednoro.flower.ops.inspect_site import (
    Holding,
    inspect_data,
    inspect_device,
    inspect_labels,
    inspect_memory,
    inspect_memory_folder,
    inspect_packages,
)
from fednoro.flower.site.station import SiteOptions, read_site


def check_site(
    site: Path,
    *,
    superlink: str | None = None,
    root_certificates: Path | None = None,
    key: Path | None = None,
    classes: Sequence[str] | None = None,
    run_config: str | None = None,
    full: bool = False,
) -> Iterator[Check]:
    """Looks at everything that can go wrong at a site;
    nothing is sent but an empty request to the SuperLink.

    Args:
        site: the site.yaml.
        superlink: HOST:PORT as the SuperNode gets it.
        root_certificates: the federation's ca.crt.
        key: the site's private key.
        classes: the federation's class names, in order.
        run_config: the run's configuration (a file or a preset), for its model, batch and classes.
        full: decode all images now rather than some.
    """
    yield from run_inspection("packages", inspect_packages)
    yield from _check_settings(site, classes, run_config, full)
    if root_certificates is not None:
        yield from run_inspection("ca", lambda: inspect_ca(root_certificates))
    if key is not None:
        yield from run_inspection("key", lambda: inspect_key(key))
    if superlink is not None:
        if root_certificates is not None and not root_certificates.is_file():
            return
        yield from run_inspection(
            "connection", lambda: inspect_connection(superlink, root_certificates)
        )
    missing = [
        name
        for name, value in (
            ("--superlink", superlink),
            ("--root-certificates", root_certificates),
            ("--key", key),
        )
        if value is None
    ]
    if missing:
        yield warning(
            "connection",
            f"not looked at without {', '.join(missing)}",
            "give what the SuperNode is given",
        )


def _check_settings(
    site: Path, classes: Sequence[str] | None, run_config: str | None, full: bool
) -> Iterator[Check]:
    try:
        options = read_site(site)
    except (UserError, OSError) as error:
        yield failed("site.yaml", str(error), f"write one with: fednoro flower site init {site}")
        return
    yield ok("site.yaml", f"{site} is complete")
    config: Config | None = None
    if run_config is not None:
        try:
            config = resolve(run_config)
        except UserError as error:
            yield failed("run", str(error), "ask the coordinator for the configuration of the run")
    yield from run_inspection(
        "disk", lambda: inspect_memory_folder(Path(options.memory).expanduser())
    )
    yield from run_inspection("device", lambda: inspect_device(options.device))
    holding: Holding | None = None
    source = resolve({"preset": "digits", "data": dict(options.data), "noise": "none"}).data
    for result in run_inspection("data", lambda: inspect_data(source, full)):
        if isinstance(result, Holding):
            holding = result
        else:
            yield result
    if holding is not None:
        yield from _check_holding(holding, options, config, classes)


def _check_holding(
    holding: Holding, options: SiteOptions, config: Config | None, classes: Sequence[str] | None
) -> Iterator[Check]:
    federation_classes = classes if classes is not None else _classes_of(config)
    yield from inspect_labels(holding, federation_classes, options.min_count, options.score_epsilon)
    if options.audit is not None or not options.audited:
        part = (
            "takes part in audits: sums and counts are sent"
            if options.audited
            else "takes no part in audits"
        )
        yield ok("audit", f"this site {part}")
    if config is None:
        yield warning(
            "memory",
            "not looked at without --run-config",
            "ask the coordinator for the run's configuration",
        )
    else:
        yield from run_inspection("memory", lambda: inspect_memory(config, holding, options.device))


def _classes_of(config: Config | None) -> tuple[str, ...] | None:
    """The class names that a run's configuration states, if it does."""
    classes = None if config is None else getattr(config.data, "classes", None)
    return tuple(classes) if isinstance(classes, tuple) else None
