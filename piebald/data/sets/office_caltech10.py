"""Office-Caltech10: photographs of ten objects from four sources; clients differ in their cameras."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from piebald.core.arguments import checked
from piebald.core.errors import unknown
from piebald.data.sets.dataset import DataSet, Owners, decode, lazily
from piebald.data.sets.download import read_npz

FORMS = ("images", "squeezenet", "surf")


@checked
def office_caltech10(form: Literal["images", "squeezenet", "surf"] = "images", lazy: bool = False) -> DataSet:
    """2,533 photographs, 10 classes; no published test part.

    Owners: "domain" (amazon 958, caltech10 1,123, dslr 157, webcam 295).

    Args:
        form: "images" [2533, 3, 128, 128] uint8; "squeezenet" [2533, 512] float32, features of the original images; or
            "surf" [2533, 800] float32, histograms of local features.  SURF rows have the labels of the images in the
            same order, but row i need not be image i.
        lazy: keep the images as JPEG in memory (11 MB, not 124) and decode them at each access.

    Raises:
        SettingError: the file in office_caltech10/ is missing (it is prepared from several sources, so it cannot be
            downloaded), or the form does not exist.
    """
    if form not in FORMS:
        raise unknown("form of office_caltech10", form, FORMS)
    file = f"office_caltech10_{'images' if form == 'images' else 'features'}.npz"
    prefix = "surf_" if form == "surf" else ""
    inputs = ("jpeg", "offset") if form == "images" else (form,)
    stored = read_npz("office_caltech10", file, (*inputs, f"{prefix}y", f"{prefix}domain", "domains", "classes"))
    if form == "images":
        jpeg = (stored["jpeg"], stored["offset"], file)
        x = lazily(*jpeg) if lazy else torch.from_numpy(decode(*jpeg))
    else:
        x = torch.from_numpy(stored[form].astype(np.float32))
    return DataSet(
        name="office_caltech10",
        x=x,
        y=torch.from_numpy(stored[f"{prefix}y"].astype(np.int64)),
        classes=stored["classes"].tolist(),
        owners={"domain": Owners.of(stored[f"{prefix}domain"], dict(enumerate(stored["domains"].tolist())))},
        source="Office and Caltech-256, the ten classes that they share; images resized to 128 x 128",
        licence="none stated; research use with citation",
        citation="B. Gong, Y. Shi, F. Sha, K. Grauman, Geodesic Flow Kernel for Unsupervised Domain Adaptation, CVPR "
        "2012; K. Saenko, B. Kulis, M. Fritz, T. Darrell, Adapting Visual Category Models to New Domains, ECCV 2010; "
        "G. Griffin, A. Holub, P. Perona, Caltech-256 Object Category Dataset, 2007",
    )
