"""The tree: longest prefixes, token-exact partners, and who hangs from whom."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.index import Node, PrefixIndex, common_tokens
from kvstore.keys import TOKEN_BYTES, chunk_key, encode_tokens, root_key
from kvstore.tiers.base import ChunkRecord, ChunkStats, TierName

CHUNK = 4
IDENTITY = bytes(32)
ROOT = root_key(IDENTITY, "")


class Tree:
    """An index filled by hand; ``disk`` plays the tier that remembers token ids."""

    def __init__(self) -> None:
        self.disk: dict[bytes, bytes] = {}
        self.reads = 0
        self.index = PrefixIndex(CHUNK, self._read)

    def _read(self, node: Node) -> bytes | None:
        self.reads += 1
        return self.disk.get(node.key)

    def add(self, tokens: list[int], root: bytes = ROOT, known: bool = True) -> list[Node]:
        """Add the chunks of a sequence that are not there, the last one possibly partial."""
        nodes: list[Node] = []
        parent: Node | None = None
        for start in range(0, len(tokens), CHUNK):
            piece = encode_tokens(tokens[start : start + CHUNK])
            above = parent.key if parent else root
            key = chunk_key(above, piece)
            node = self.index.get(key)
            if node is None:
                record = ChunkRecord(key, above, IDENTITY, len(piece) // TOKEN_BYTES, start // CHUNK)
                node = Node(record, piece if known else None, parent, ChunkStats(), tiers={TierName.DISK})
                self.disk[key] = piece
                self.index.add(node)
            nodes.append(node)
            parent = node
        return nodes

    def match(self, tokens: list[int], root: bytes = ROOT) -> int:
        return self.index.walk(root, encode_tokens(tokens)).n_tokens


def test_whole_chunks_match_then_the_exact_tokens_of_one_more() -> None:
    tree = Tree()
    nodes = tree.add([1, 2, 3, 4, 5, 6, 7, 8])
    path = tree.index.walk(ROOT, encode_tokens([1, 2, 3, 4, 5, 6, 9, 9, 9]))
    assert path.nodes == nodes[:1]
    assert (path.partial, path.partial_tokens) == (nodes[1], 2)
    assert path.n_tokens == 6


def test_every_shared_length_is_matched_exactly() -> None:
    stored = list(range(1, 14))
    tree = Tree()
    tree.add(stored)
    for shared in range(len(stored) + 1):
        assert tree.match([*stored[:shared], 99, 98, 97, 96, 95]) == shared


def test_the_best_of_many_siblings_is_the_partner() -> None:
    tree = Tree()
    rng = random.Random(5)
    siblings = {tuple(rng.randrange(3) for _ in range(CHUNK)) for _ in range(40)}
    for sibling in siblings:
        tree.add(list(sibling))
    for _ in range(100):
        wanted = [rng.randrange(3) for _ in range(CHUNK)]
        best = max(common_tokens(encode_tokens(wanted), encode_tokens(list(s))) for s in siblings)
        assert tree.match(wanted) == best


def test_a_partial_chunk_is_a_leaf_and_gives_only_its_own_tokens() -> None:
    tree = Tree()
    tree.add([1, 2, 3, 4, 5, 6])
    assert tree.match([1, 2, 3, 4, 5, 6, 7, 8, 9]) == 6


def test_roots_keep_tenants_apart() -> None:
    tree = Tree()
    other = root_key(IDENTITY, "tenant")
    tree.add([1, 2, 3, 4], root=other)
    assert tree.match([1, 2, 3, 4]) == 0
    assert tree.match([1, 2, 3, 4], root=other) == 4


def test_a_key_is_not_trusted_without_its_token_ids() -> None:
    tree = Tree()
    (node,) = tree.add([1, 2, 3, 4], known=False)
    tree.disk[node.key] = encode_tokens([1, 2, 3, 9])
    assert tree.index.walk(ROOT, encode_tokens([1, 2, 3, 4])).nodes == []


def test_unreadable_token_ids_are_a_miss() -> None:
    tree = Tree()
    tree.add([1, 2, 3, 4], known=False)
    tree.disk.clear()
    assert tree.match([1, 2, 3, 4]) == 0


def test_token_ids_are_read_at_first_use_and_only_once() -> None:
    tree = Tree()
    tree.add([1, 2, 3, 4, 5, 6, 7, 8], known=False)
    assert tree.reads == 0
    assert tree.match([1, 2, 3, 4, 5, 6, 7, 8]) == 8
    reads = tree.reads
    assert reads == 2
    assert tree.match([1, 2, 3, 4, 5, 6, 7, 8]) == 8
    assert tree.reads == reads


def test_removed_chunks_match_no_more_and_their_siblings_do() -> None:
    tree = Tree()
    tree.add([1, 2, 3, 4])
    (gone,) = tree.add([1, 2, 3, 5])
    tree.index.remove(gone)
    assert tree.match([1, 2, 3, 5]) == 3
    assert tree.match([1, 2, 3, 4]) == 4
    assert len(tree.index) == 1


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 2), min_size=1, max_size=13), st.booleans()), max_size=30)
)
def test_any_history_agrees_with_a_list_of_prefixes(history: list[tuple[bool, list[int], bool]]) -> None:
    """The longest match is the longest prefix shared with any stored sequence."""
    tree = Tree()
    stored: list[list[int]] = []
    for store, tokens, known in history:
        if store:
            tree.add(tokens, known=known)
            stored.append(tokens)
        expected = max((common_tokens(encode_tokens(tokens), encode_tokens(s)) for s in stored), default=0)
        assert tree.match(tokens) == expected
        for node in tree.index:
            assert node.parent is None or tree.index.get(node.parent.key) is node.parent
