"""A site's letter after an audit, on the site's own disk:
its images with labels to look at, as a page and as CSV.
"""

from __future__ import annotations

from pathlib import Path

from fednoro.audit.audit_method import Audit
from fednoro.audit.site_letter import Holding, Judgement, write_letter
from fednoro.core.files import disk_errors
from fednoro.data.client import Client
from fednoro.data.dataset import Dataset

FOLDER = "audits"  # below the site's memory folder; one folder in it for each audit


def leave_letter(memory: Path, key: str, client: Client, dataset: Dataset, audit: Audit) -> Path:
    """Writes letter.html, images.csv and accepted.csv
    from what the audit left in the client's memory.

    Most audits take all of a site's images. They may be many, and are not picked out then.
    """
    ids = dataset.ids or tuple(map(str, range(len(dataset))))
    images, complete = dataset.images, len(client.index) == len(dataset)
    if not complete:
        images, ids = images[client.index], tuple(ids[i] for i in client.index)
    site = Holding(client.name, images, client.observed, ids, dataset.classes)
    folder = memory / FOLDER / key
    with disk_errors(folder):
        # For the user that runs the node alone: the letter has images.
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.parent.chmod(0o700)
    write_letter(folder, site, Judgement.from_memory(client.memory, audit.explain()))
    return folder / "letter.html"
