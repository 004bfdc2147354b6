"""The configuration that a run was begun with, kept beside its checkpoints: an edited config.yaml is noticed there.

Runs of earlier versions have kept none; it is then the one that they are first resumed with.
"""

from __future__ import annotations

from pathlib import Path

from fednoro.config import INCIDENTAL, Config, dump, flat, resolve
from fednoro.core.files import write_whole
from fednoro.core.types import UserError

# What may change without another result than a run on other hardware or in another place would have. Data are told
# apart by what they are (`federation.fingerprint`), so that their files may move.
HARMLESS = {*INCIDENTAL, "data.path", "data.csv", "data.labels", "data.cache"}
NAMED = 5  # changes that are told


def keep_or_compare(folder: Path, config: Config) -> None:
    """Keeps what the run in `folder` is begun with, or refuses what differs from it."""
    kept = folder / "checkpoints" / "config.yaml"
    if not kept.exists():
        write_whole(kept, dump(config).encode())
        return
    try:
        before, now = flat(resolve(kept)), flat(config)
    except UserError:  # an earlier version had options that are gone: whoever took them out of config.yaml had to
        return
    if changed := [key for key in {**before, **now} if key not in HARMLESS and before.get(key) != now.get(key)]:
        named = ", ".join(f"{key} (was {before.get(key)}, is {now.get(key)})" for key in changed[:NAMED])
        named += f" and {len(changed) - NAMED} more" if len(changed) > NAMED else ""
        file = folder / "config.yaml"
        raise UserError(
            f"{file} has changed since the run began: {named}. Set it back, or begin another run with: "
            f"fednoro run {file} name=another"
        )
