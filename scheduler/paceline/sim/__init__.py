"""The same core, driven by a runner without a model and a clock without time."""

from paceline.compiled import path_of

__path__ = path_of("sim", __path__)

from paceline.sim.clock import VirtualClock
from paceline.sim.scripted_runner import ScriptedRunner, next_token, reference_output
from paceline.sim.simulated_runner import SimulatedRunner, StepCost
from paceline.sim.simulation import Arrival, Simulation, simulate

__all__ = [
    "Arrival",
    "ScriptedRunner",
    "SimulatedRunner",
    "Simulation",
    "StepCost",
    "VirtualClock",
    "next_token",
    "reference_output",
    "simulate",
]
