"""Cross-validated linear probes: what a linear classifier reads from states, in closed form (ridge) or by logistic regression, both scikit-learn's."""

from __future__ import annotations

import numpy as np


def folds_of(n: int, count: int, seed: int) -> np.ndarray:
    """The fold [n] of each sample: a random cut into `count` parts of nearly equal size."""
    return np.random.default_rng([seed, 21]).permutation(np.arange(n) % count)


def ridge_hits(states: np.ndarray, labels: np.ndarray, folds: np.ndarray, penalty: float) -> np.ndarray:
    """Whether held-out labels are read right: states [n, d], labels [n, k] (k questions to the same states) -> hits [n, k].

    Per fold the states are standardised by the other folds, and each question's classes regressed as -1/+1 columns with one ridge penalty;
    the largest column is the answer. That is scikit-learn's RidgeClassifier(alpha=penalty) per question, all solved at once.
    """
    import sklearn
    from sklearn.linear_model import Ridge

    classes = [np.unique(column) for column in labels.T]
    at = np.cumsum([0, *map(len, classes)])
    targets = np.concatenate([2.0 * (labels[:, k, None] == c) - 1 for k, c in enumerate(classes)], axis=1)
    hits = np.zeros(labels.shape, dtype=bool)
    for fold in np.unique(folds):
        train, test = folds != fold, folds == fold
        centre, scale = states[train].mean(0), states[train].std(0)
        scaled = (states - centre) / np.where(scale > 0, scale, 1)
        with sklearn.config_context(assume_finite=True, skip_parameter_validation=True):  # a third of the time of so small a fit
            scores = Ridge(alpha=penalty).fit(scaled[train], targets[train]).predict(scaled[test])
        for k, c in enumerate(classes):
            hits[test, k] = c[scores[:, at[k] : at[k + 1]].argmax(1)] == labels[test, k]
    return hits


def logistic_hits(states: np.ndarray, labels: np.ndarray, folds: np.ndarray) -> np.ndarray:
    """The same by multinomial logistic regression (scikit-learn's defaults on standardised states)."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    hits = np.zeros(labels.shape, dtype=bool)
    for fold in np.unique(folds):
        train, test = folds != fold, folds == fold
        for k in range(labels.shape[1]):
            fitted = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)).fit(states[train], labels[train, k])
            hits[test, k] = fitted.predict(states[test]) == labels[test, k]
    return hits


def unrelated(labels: np.ndarray, together: int = 1) -> tuple[float, float]:
    """Accuracy that answers unrelated to the states get, mean over the questions of labels [n, k], and its standard error over n * together hits.

    Answers as frequent as the labels, p, are right in sum(p^2) of the cases. together: questions whose hits are independent, at most k.
    Worked example: labels (0, 0, 1, 2): p = 1/2, 1/4, 1/4, so 3/8, and with together = 1 sqrt(3/8 * 5/8 / 4) = 0.242.
    """
    right = float(np.mean([np.square(np.unique(column, return_counts=True)[1] / len(column)).sum() for column in labels.T]))
    return right, float(np.sqrt(right * (1 - right) / (len(labels) * together)))


def chance(labels: np.ndarray) -> np.ndarray:
    """What always naming the commonest label gets, per question [k] of labels [n, k]."""
    return np.array([np.unique(column, return_counts=True)[1].max() / len(column) for column in labels.T])
