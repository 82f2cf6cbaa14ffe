"""A server as a process of its own, without a model: `python -m support.scripted_server '{"port": 0}'`.

The argument is ServerSettings in JSON; steps take a hundredth of a second, and everything is logged.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path

from paceline.config_file import TenantsFile
from paceline.core.config import SchedulerConfig
from paceline.core.depth_policy import FixedDepth
from paceline.core.plan import StepPlan, StepResult
from paceline.core.scheduler import Scheduler
from paceline.core.speculation import SpeculationControl
from paceline.engine import Engine
from paceline.server import ServerSettings, run_server
from paceline.server.logs import configure
from paceline.sim import ScriptedRunner
from support.serving import EOS, MAX_MODEL_LEN, MODEL, NUM_BLOCKS, ToyTokenizer

PATHS = ("tls_cert", "tls_key", "client_ca", "tenants")
STEP_SECONDS = 0.01


class SlowRunner(ScriptedRunner):
    def execute(self, plan: StepPlan) -> StepResult:
        time.sleep(STEP_SECONDS)
        return super().execute(plan)


def build(granted: TenantsFile) -> Engine:
    # Blocks of one token, so that a tenant's max_blocks can be too few for any request.
    config = SchedulerConfig(num_blocks=4 * NUM_BLOCKS, block_size=1, max_model_len=MAX_MODEL_LEN, eos_token_ids=(EOS,))
    runner = SlowRunner(4 * NUM_BLOCKS, 1)
    return Engine(Scheduler(config, SpeculationControl(FixedDepth(0))), runner, ToyTokenizer(), MODEL)


def main() -> None:
    given = json.loads(sys.argv[1])
    settings = ServerSettings(**{name: Path(value) if name in PATHS else value for name, value in given.items()})
    configure(settings.log_format)
    logging.getLogger().setLevel(logging.DEBUG)
    run_server(build, settings)


if __name__ == "__main__":
    main()
