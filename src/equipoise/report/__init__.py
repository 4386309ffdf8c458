"""The report of studies or of a run, as one self-contained HTML page."""

from equipoise.report.page import make_page, write_report

__all__ = ["make_page", "write_report"]
