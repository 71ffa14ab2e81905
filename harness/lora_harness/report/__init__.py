"""What a run leaves behind and shows: metrics, TensorBoard, progress, plot, summary."""

from lora_harness.report.run_report import RunReport, refuse_used_output
from lora_harness.report.summary import Summary

__all__ = ["RunReport", "Summary", "refuse_used_output"]
