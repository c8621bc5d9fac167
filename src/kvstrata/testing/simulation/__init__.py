"""Deterministic simulation of the whole stack: one process, one seed, virtual time (docs/simulation.md)."""

from __future__ import annotations

from kvstrata.testing.simulation.run import Outcome, Simulation, SimulationError, simulate

__all__ = ["Outcome", "Simulation", "SimulationError", "simulate"]
