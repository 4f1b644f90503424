from mismatch.reports.budget import budget_of
from mismatch.reports.forecast import forecast_of

__all__ = ["budget_of", "forecast_of"]
