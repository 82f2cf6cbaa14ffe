"""A plugin of pytest: dozens of engines are built, and nobody needs to know to the percent what their steps cost."""

from __future__ import annotations

from paceline import wiring

wiring.PROFILE_SECONDS = 0.2
