"""Trained models as files that other programs read, with a model card.

A format writes one module to one path; nothing in a file is executed when it is loaded.  Which model of a run is
exported is not decided here but by `Run.save`.
"""

from piebald.report.export.card import load_weights as load_weights
from piebald.report.export.card import model_card as model_card
from piebald.report.export.export_formats import FORMATS as FORMATS
from piebald.report.export.export_formats import SUFFIXES as SUFFIXES
from piebald.report.export.export_formats import Exported as Exported
from piebald.report.export.export_formats import ExportFormat as ExportFormat
from piebald.report.export.export_formats import export_model as export_model
