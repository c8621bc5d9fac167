"""Read by every Python of an engine under test, its workers included: breaks one rank if the environment says so."""

import os

if os.environ.get("ENGINE_TEST_BAD_RANK"):
    from kvstrata.integrations.vllm import worker

    _real = worker.WorkerSide.start_loads

    def _start_loads(self, work):  # type: ignore[no-untyped-def]
        """Loads of the bad rank fail."""
        if str(self._rank) == os.environ["ENGINE_TEST_BAD_RANK"]:
            for job in work.loads:
                job.valid = False
        _real(self, work)

    worker.WorkerSide.start_loads = _start_loads
