"""What this machine has for serving, how fast that is, and what to do about whatever is missing."""

from paceline.doctor.report import examine, render, to_json

__all__ = ["examine", "render", "to_json"]
