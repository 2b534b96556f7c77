"""The no-op workers as `oraculo worker benchmarks.workers:app` finds them."""

from benchmarks.workloads import no_op_workers

app = no_op_workers()
