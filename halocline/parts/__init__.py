"""Parts of a model on parts of the mesh: placement and pipelines."""

from .actions import Action, PipelineSchedule
from .api import pipeline, place
from .cutting import StageCut
from .kinds import RankKind, place_by_cost
from .pipeline import PipelinedModel
from .schedules import make_schedule

__all__ = [
    "Action",
    "PipelineSchedule",
    "PipelinedModel",
    "RankKind",
    "StageCut",
    "make_schedule",
    "pipeline",
    "place",
    "place_by_cost",
]
