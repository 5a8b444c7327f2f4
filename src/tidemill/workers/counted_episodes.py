"""Which episodes of an evaluation count.

Not those that end first: these would be the short ones. Episodes count in rounds, so
that it is known which before they begin: the first episode of everybody who plays (lanes,
seats, environments) in their order, then the second of each, and so on.
"""


def counted_of(player: int, players: int, episodes: int) -> int:
    """Return how many episodes of a player are among the first so many."""
    return -(-(episodes - player) // players)


def next_counted(counted: int, players: int) -> tuple[int, int]:
    """Return whose episode counts after so many, and which one of theirs: (player,
    number)."""
    number, player = divmod(counted, players)
    return player, number
