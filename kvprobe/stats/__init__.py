"""Statistics: pure functions of arrays, used by every probe and figure (Random Attention sec. 4.1, app. B, app. E).

Samples of one cluster (a problem, a planted fact) are not independent: clusters are what is drawn, counted and compared.
Random draws depend on seed, replicates and the number of clusters alone, so that everything with the same three is paired.
"""

from .bootstrap import REPLICATES, Estimate, bootstrap, difference, draw_counts, mean, percentiles, ratio, t_mean
from .comparison import ALPHA, RULES, Cell, Comparison, compare
from .correlation import Correlation, spearman
from .spreads import SignTest, Spread, run_sd, sign_test, spread

__all__ = ["ALPHA", "REPLICATES", "RULES", "Cell", "Comparison", "Correlation", "Estimate", "SignTest", "Spread", "bootstrap", "compare", "difference", "draw_counts", "mean",
           "percentiles", "ratio", "run_sd", "sign_test", "spearman", "spread", "t_mean"]
