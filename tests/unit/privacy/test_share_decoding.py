"""Shares that are wrong: the decoder against a second one, its bound, and who is blamed for what."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping

import pytest
import torch

from fedgraft.core.errors import FedgraftError
from fedgraft.privacy.secagg import keys as crypto
from fedgraft.privacy.secagg import server as server_module
from fedgraft.privacy.secagg import shamir
from fedgraft.privacy.secagg.secure_sum import Identity, Plan, SecureClient, SecureServer, Segment, drive
from fedgraft.privacy.secagg.server import DEALT_WRONGLY, WRONG_SHARES

PRIME = 2**521 - 1


def dealt(draw: random.Random, threshold: int, count: int) -> tuple[bytes, dict[int, bytes]]:
    secret = draw.randbytes(32)
    holders = draw.sample(range(1, 3 * count + 1), count)
    return secret, shamir.split(secret, threshold, holders, draw.randbytes)


def spoil(draw: random.Random, shares: Mapping[int, bytes], wrong: int) -> tuple[dict[int, bytes], set[int]]:
    """Other field elements in the place of some shares: random ones, or next to the right one."""
    chosen = draw.sample(sorted(shares), wrong)
    spoiled = dict(shares)
    for x in chosen:
        shift = draw.choice([1, draw.randrange(1, PRIME)])
        spoiled[x] = ((int.from_bytes(shares[x], "big") + shift) % PRIME).to_bytes(66, "big")
    return spoiled, set(chosen)


def berlekamp_welch(shares: Mapping[int, bytes], threshold: int, errors: int) -> list[int]:
    """The reference: solve Q(x) = y E(x) for all shares by elimination, E monic of degree `errors`; return Q / E."""
    unknowns = threshold + 2 * errors
    rows = []
    for x, share in shares.items():
        y = int.from_bytes(share, "big")
        powers_of_q = [pow(x, i, PRIME) for i in range(threshold + errors)]
        powers_of_e = [-y * pow(x, i, PRIME) % PRIME for i in range(errors)]
        rows.append([*powers_of_q, *powers_of_e, y * pow(x, errors, PRIME) % PRIME])
    solution = [0] * unknowns
    pivots: list[int] = []
    for column in range(unknowns):
        pivot = next((i for i in range(len(pivots), len(rows)) if rows[i][column]), None)
        if pivot is None:
            continue
        place = len(pivots)
        rows[place], rows[pivot] = rows[pivot], rows[place]
        inverse = pow(rows[place][column], -1, PRIME)
        rows[place] = [value * inverse % PRIME for value in rows[place]]
        for i, row in enumerate(rows):
            if i != place and row[column]:
                rows[i] = [(a - row[column] * b) % PRIME for a, b in zip(row, rows[place], strict=True)]
        pivots.append(column)
    for place, column in enumerate(pivots):
        solution[column] = rows[place][-1]
    q, e = solution[: threshold + errors], [*solution[threshold + errors :], 1]
    quotient = [0] * threshold
    for shift in reversed(range(threshold)):
        quotient[shift] = q[shift + errors]
        for i, coefficient in enumerate(e):
            q[shift + i] = (q[shift + i] - quotient[shift] * coefficient) % PRIME
    assert not any(q)
    return quotient


@pytest.mark.slow
def test_t_plus_2e_plus_1_shares_with_e_wrong_give_the_secret_and_name_the_wrong_ones() -> None:
    """The bar: 1,000 of 1,000; `degree` + 2 e + 1 shares, at the very bound."""
    draw = random.Random(36)
    right = 0
    for _ in range(1000):
        degree, errors = draw.randrange(1, 7), draw.randrange(0, 5)
        secret, shares = dealt(draw, degree + 1, degree + 2 * errors + 1)
        spoiled, wrong = spoil(draw, shares, errors)
        found = shamir.decode(spoiled, degree + 1)
        right += (found.secret, found.wrong, found.certain) == (secret, wrong, True)
    assert right == 1000


def test_the_decoder_agrees_with_berlekamp_and_welch() -> None:
    draw = random.Random(1)
    for _ in range(20):
        threshold, errors = draw.randrange(2, 6), draw.randrange(1, 4)
        _, shares = dealt(draw, threshold, threshold + 2 * errors)
        spoiled, wrong = spoil(draw, shares, errors)
        reference = berlekamp_welch(spoiled, threshold, errors)
        found = shamir.decode(spoiled, threshold)
        assert int.from_bytes(found.secret, "big") == reference[0] and found.wrong == wrong


@pytest.mark.slow
def test_beyond_the_bound_it_is_refused_and_never_another_secret() -> None:
    draw = random.Random(2)
    for _ in range(40):
        threshold, errors = draw.randrange(2, 7), draw.randrange(1, 3)
        secret, shares = dealt(draw, threshold, threshold + 2 * errors - 1)
        spoiled, _ = spoil(draw, shares, errors)
        with pytest.raises(shamir.WrongShares):
            shamir.decode(spoiled, threshold)
        # With the commitment one more is decoded for certain, and with fewer than `threshold` right ones nothing is.
        found = shamir.recover(spoiled, threshold, lambda s, secret=secret: s == secret)  # type: ignore[misc]
        assert found.secret == secret and found.certain
        hopeless = dict(shares)
        for x in draw.sample(sorted(shares), len(shares) - threshold + 1):
            hopeless[x] = draw.randrange(PRIME).to_bytes(66, "big")
        with pytest.raises(shamir.WrongShares):
            shamir.recover(hopeless, threshold, lambda s, secret=secret: s == secret)  # type: ignore[misc]


def by_neighbours(shares: Mapping[int, bytes], threshold: int, genuine: Callable[[bytes], bool]) -> bytes | None:
    """The broken variant: as it was, any `threshold` neighbouring shares."""
    holders = sorted(shares)
    for start in range(len(holders)):
        chosen = [holders[(start + i) % len(holders)] for i in range(threshold)]
        try:
            secret = shamir.combine({x: shares[x] for x in chosen})
        except shamir.WrongShares:
            continue
        if genuine(secret):
            return secret
    return None


def test_two_wrong_of_ten_are_found_wherever_they_are() -> None:
    draw = random.Random(3)
    secret = draw.randbytes(32)
    shares = shamir.split(secret, 7, range(1, 11), draw.randbytes)
    given_up = 0
    for pair in itertools.combinations(range(1, 11), 2):
        spoiled = shares | {x: draw.randbytes(64).rjust(66, b"\0") for x in pair}
        found = shamir.recover(spoiled, 7, lambda s: s == secret)
        assert found == shamir.Decoded(secret, frozenset(pair), certain=True)
        assert shamir.recover(spoiled, 7, lambda s: s == secret, suspects=pair[:1]) == found
        given_up += by_neighbours(spoiled, 7, lambda s: s == secret) is None
    assert given_up == 25


def test_shares_moved_so_that_others_look_wrong_give_the_secret_and_blame_nobody_for_certain() -> None:
    """Two of ten holders shift theirs by a polynomial that is zero at zero and at five honest places."""
    draw = random.Random(4)
    secret = draw.randbytes(32)
    shares = shamir.split(secret, 7, range(1, 11), draw.randbytes)
    framed = dict(shares)
    for x in (1, 2):
        shift = x
        for spared in (3, 4, 5, 6, 7):
            shift = shift * (x - spared) % PRIME
        framed[x] = ((int.from_bytes(shares[x], "big") + shift) % PRIME).to_bytes(66, "big")
    for suspects in ((), (8, 9, 10), (1, 2)):
        found = shamir.recover(framed, 7, lambda s: s == secret, suspects)
        assert found.secret == secret
        assert not found.certain or found.wrong == {1, 2}


def test_a_share_over_the_prime_is_wrong() -> None:
    secret = bytes(32)
    shares = shamir.split(secret, 3, range(1, 6))
    over = shares | {2: (int.from_bytes(shares[2], "big") + PRIME).to_bytes(66, "big")}
    found = shamir.recover(over, 3, lambda s: s == secret)
    assert found == shamir.Decoded(secret, frozenset({2}), certain=True)


# ---- one cheat in a whole sum ----------------------------------------------------------------------------------------

CHEAT = 2


def run_sum(
    clients: int, cheat: Callable[[str, SecureClient, dict[str, torch.Tensor]], None], silent: Mapping[str, int]
) -> SecureServer:
    """Run a sum of ones in which client 2 changes its answers, and others vanish at a stage; return the server."""
    plan = Plan("run", 0, tuple(range(clients)), (Segment("x", 3, 1.0),))
    members = {client: SecureClient(plan, client, Identity.fresh()) for client in plan.clients}
    words = plan.ring.encode({"x": torch.ones(3)}, torch.Generator().manual_seed(0))
    server = SecureServer(plan)
    gone: set[int] = set()

    def exchange(stage: str, outbox: dict[int, dict[str, torch.Tensor]]) -> dict[int, dict[str, torch.Tensor]]:
        answers = {}
        if stage in silent:
            gone.add(silent[stage])
        for client, data in outbox.items():
            if client in gone:
                continue
            if client == CHEAT and stage == "shares":
                cheat("before", members[client], {})
            answers[client] = members[client].answer(stage, data, lambda: words)
            if client == CHEAT:
                cheat(stage, members[client], answers[client])
        return answers

    drive(server, exchange)
    return server


def other_shares(stage: str, client: SecureClient, answer: dict[str, torch.Tensor]) -> None:
    if stage == "unmask":
        answer["shares"][:, 40] ^= 1


def other_commitment(stage: str, client: SecureClient, answer: dict[str, torch.Tensor]) -> None:
    if stage == "shares":
        answer["commitment"][0] ^= 1


def other_secret(stage: str, client: SecureClient, answer: dict[str, torch.Tensor]) -> None:
    """Commit to one seed and deal shares of another."""
    if stage == "shares":
        answer["commitment"] = torch.frombuffer(bytearray(crypto.commitment(b"\1" * 32)), dtype=torch.uint8)


def one_bad_share(stage: str, client: SecureClient, answer: dict[str, torch.Tensor]) -> None:
    """Deal a wrong share to one honest client, so that it looks like a liar."""
    if stage == "before":
        real, calls = shamir.split, []

        def split(secret: bytes, threshold: int, holders: list[int], entropy: Callable[[int], bytes]) -> object:
            shares = real(secret, threshold, holders, entropy)
            calls.append(1)
            shares[1] = bytes(66)  # the share of client 0
            if len(calls) == 2:
                shamir.split = real
            return shares

        shamir.split = split  # type: ignore[assignment]


@pytest.mark.parametrize("silent", [{}, {"masked": 4}, {"unmask": 5}], ids=["all stay", "one is lost", "one late"])
def test_who_reveals_other_shares_is_named_and_the_sum_is_opened(silent: dict[str, int]) -> None:
    server = run_sum(7, other_shares, silent)
    assert server.result is not None
    expected = 7 - ("masked" in silent)
    assert server.result.sums["x"].tolist() == pytest.approx([expected] * 3, abs=1e-6)
    assert list(server.cheats) == [CHEAT] and server.cheats[CHEAT].startswith(WRONG_SHARES)


@pytest.mark.parametrize("cheat", [other_commitment, other_secret])
def test_who_deals_another_secret_than_it_committed_to_is_named(
    cheat: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    servers: list[SecureServer] = []
    real_open = SecureServer.open

    def open_and_keep(self: SecureServer) -> object:
        servers.append(self)
        return real_open(self)

    monkeypatch.setattr(SecureServer, "open", open_and_keep)
    with pytest.raises(FedgraftError) as caught:
        run_sum(5, cheat, {})
    assert caught.value.code == "E-PRIVACY-SUM-WRONG-SHARES"
    assert list(servers[0].cheats) == [CHEAT] and servers[0].cheats[CHEAT].startswith(DEALT_WRONGLY)


def test_an_honest_client_that_was_dealt_a_wrong_share_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    server = run_sum(5, one_bad_share, {})
    assert server.result is not None and server.cheats == {}

    def at_once(self: SecureServer, held: object, decoded: Mapping[int, shamir.Decoded], failures: object) -> None:
        """The broken variant: whoever reveals one wrong share is named."""
        for one in decoded.values():
            self.cheats |= {point - 1: WRONG_SHARES for point in one.wrong}

    monkeypatch.setattr(server_module.SecureServer, "_name_cheats", at_once)
    assert list(run_sum(5, one_bad_share, {}).cheats) == [0]


def test_with_keys_that_act_alike_an_honest_holder_would_be_blamed() -> None:
    """A rebuilt key is recognised by its public key, which 32 keys have; only one form of it counts."""
    key = crypto.canonical_private_key(bytes(range(32)))
    alike = bytes([key[0] | 1, *key[1:]])
    assert crypto.public_key(alike) == crypto.public_key(key) and alike != key
    assert crypto.canonical_private_key(alike) == key
    shares = shamir.split(key, 3, range(1, 5))
    shifted = dict(shares)
    # Client 1 shifts its share by the polynomial that is 2^248 at zero (the first byte's lowest bit) and zero at 2, 3.
    shift = (1 << 248) * (1 - 2) * (1 - 3) * pow(2 * 3, -1, PRIME)
    shifted[1] = ((int.from_bytes(shares[1], "big") + shift) % PRIME).to_bytes(66, "big")

    def strict(secret: bytes) -> bool:
        return secret == crypto.canonical_private_key(secret) and crypto.public_key(secret) == crypto.public_key(key)

    assert shamir.recover(shifted, 3, strict).wrong == {1}
    loose = shamir.recover(shifted, 3, lambda s: crypto.public_key(s) == crypto.public_key(key), suspects=[4])
    assert loose.wrong == {4}  # the broken variant blames an honest holder
