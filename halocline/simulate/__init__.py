"""A planned step on a whole cluster: how it scales, what it waits for, and what would have to improve."""

from .levers import Levers
from .scenario import Scenario, ScenarioError
from .step import Simulation, simulate

__all__ = ["Levers", "Scenario", "ScenarioError", "Simulation", "simulate"]
