"""BlockPool by hand: ownership, prefix matches, eviction order, fences."""

from coterie.attention.block_pool import ROOT_HASH, BlockPool, hash_block


def commit_all(pool: BlockPool, blocks: list[int], token_ids: list[int]) -> list[bytes]:
    hashes: list[bytes] = []
    for index, block in enumerate(blocks):
        tokens = token_ids[index * pool.block_size : (index + 1) * pool.block_size]
        hashes.append(pool.commit_block(block, hashes[-1] if hashes else ROOT_HASH, tokens))
    return hashes


def test_allocate_all_or_nothing() -> None:
    pool = BlockPool(3, 4)
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    blocks = pool.allocate(3)
    assert sorted(blocks or []) == [0, 1, 2]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


def test_prefix_found_only_after_commit() -> None:
    pool = BlockPool(4, 2)
    tokens = [1, 2, 3, 4, 5]
    blocks = pool.allocate(2) or []
    assert pool.match_prefix(tokens) == []
    commit_all(pool, blocks, tokens[:4])
    assert pool.match_prefix(tokens) == blocks
    assert pool.match_prefix([1, 2, 9, 9, 5]) == blocks[:1]
    assert pool.match_prefix([9, 2, 3, 4, 5]) == []


def test_last_token_is_never_matched() -> None:
    pool = BlockPool(4, 2)
    blocks = pool.allocate(2) or []
    commit_all(pool, blocks, [1, 2, 3, 4])
    assert pool.match_prefix([1, 2, 3, 4]) == blocks[:1]
    assert pool.match_prefix([1, 2]) == []
    assert pool.match_prefix([]) == []


def test_hash_depends_on_what_came_before() -> None:
    first = hash_block(ROOT_HASH, [1, 2])
    assert hash_block(first, [1, 2]) != first
    assert hash_block(ROOT_HASH, [1, 2]) == first


def test_shared_blocks_count_references() -> None:
    pool = BlockPool(4, 2)
    blocks = pool.allocate(2) or []
    commit_all(pool, blocks, [1, 2, 3, 4])
    pool.acquire(blocks)
    pool.free(blocks)
    assert pool.num_used == 2
    pool.free(blocks)
    assert pool.num_used == 0
    assert pool.num_free == 4


def test_blank_blocks_go_first_then_the_tail_of_the_oldest() -> None:
    pool = BlockPool(4, 1)
    old = pool.allocate(2) or []
    commit_all(pool, old, [1, 2])
    new = pool.allocate(1) or []
    commit_all(pool, new, [7])
    pool.free(old)
    pool.free(new)
    assert pool.allocate(1) == [3]
    assert pool.allocate(1) == [old[1]]
    assert pool.match_prefix([1, 2, 3]) == [old[0]]
    assert pool.allocate(1) == [old[0]]
    assert pool.match_prefix([7, 8]) == new
    assert pool.num_evictions == 2


def test_equal_content_is_cached_once() -> None:
    pool = BlockPool(4, 2)
    first = pool.allocate(1) or []
    second = pool.allocate(1) or []
    assert commit_all(pool, first, [1, 2]) == commit_all(pool, second, [1, 2])
    assert pool.match_prefix([1, 2, 3]) == first
    assert pool.block_hash(second[0]) is None


def test_fence_delays_reuse_but_counts_as_incoming() -> None:
    pool = BlockPool(2, 2)
    blocks = pool.allocate(2) or []
    pool.free(blocks, fence_step=5)
    assert (pool.num_free, pool.num_pending, pool.num_incoming) == (0, 2, 2)
    pool.process_step(4)
    assert pool.allocate(1) is None
    pool.process_step(5)
    assert pool.num_free == 2


def test_pending_cached_block_can_be_taken_back() -> None:
    pool = BlockPool(2, 2)
    blocks = pool.allocate(1) or []
    commit_all(pool, blocks, [1, 2])
    pool.free(blocks, fence_step=1)
    pool.acquire(pool.match_prefix([1, 2, 3]))
    pool.process_step(1)
    assert pool.ref_count(blocks[0]) == 1
    assert pool.num_used == 1


def test_without_prefix_caching_nothing_is_found() -> None:
    pool = BlockPool(2, 2, enable_prefix_caching=False)
    blocks = pool.allocate(1) or []
    commit_all(pool, blocks, [1, 2])
    assert pool.match_prefix([1, 2, 3]) == []


def test_room_after_a_match() -> None:
    pool = BlockPool(4, 2)
    blocks = pool.allocate(2) or []
    commit_all(pool, blocks, [1, 2, 3, 4])
    assert pool.num_free_after(blocks) == 2
    pool.free(blocks)
    assert pool.num_free == 4
    assert pool.num_free_after(blocks) == 2
