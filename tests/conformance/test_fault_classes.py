"""Every class of fault that others have reported has a test that fails on it. A name without a path is a standard test of the
conformance suite, whose docstring then names the class."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from qwen_conformance import QwenConformance

from specdec.testing.conformance import RoundConformance

ROOT = Path(__file__).parents[2]

#: Class of fault → tests, by section.
FAULTS: dict[str, dict[str, list[str]]] = {
    "state transactions": {
        "recurrent state not rolled back after rejection": [
            "test_state_after_every_round",
            "test_state_after_every_accepted_count",
        ],
        "early return in one commit path skips a second kind of state": [
            "test_state_after_every_accepted_count",
            "tests/conformance/test_qwen_round.py::test_a_field_that_a_plugin_forgets_is_named",
        ],
        "rejected tokens leave traces in recurrent memory": ["test_right_and_wrong_rounds_alternate"],
        "empty draft treated as a draft": ["test_empty_drafts_are_ordinary_rounds"],
        "convolution window too short to hold candidates plus rollback": [
            "test_state_after_every_accepted_count",
            "tests/unit/declaration/test_layout.py::test_extent_must_hold_history_and_a_round",
        ],
        "optimistic host mirror used as committed history": ["test_state_of_plain_rounds", "test_two_rounds_in_flight"],
    },
    "draft history": {
        "wrong hidden source after the first draft step": ["test_later_drafts_read_the_drafters_own_output"],
        "hidden carried to the next step lacks the shared norm": [
            "test_later_drafts_read_the_drafters_own_output",
            "tests/oracle/test_qwen_mtp.py::test_recursive_rows_follow_the_multi_stream_residual",
        ],
        "store before read at chunk boundary": ["test_prompt_chunkings_leave_the_same_state"],
        "scratch aliasing / lifetime": ["test_poison_between_rounds_changes_nothing"],
        "number of drafted rows not tracked, wrong feedback row after partial accept": [
            "test_feedback_is_the_row_of_the_last_consumed_token"
        ],
        "stale draft buffer on a skipped path": ["test_context_end"],
    },
    "termination": {
        "stop check sees only the last committed token": ["test_stop_id_at_every_offset"],
        "presentation clipped, transaction not": [
            "test_stop_id_at_every_offset",
            "tests/conformance/test_prefix_publication.py::"
            "test_b19_request_that_ends_inside_an_accepted_run_publishes_what_it_consumed",
            "tests/conformance/test_stops.py::test_b18_b19_prefix_after_a_stop_ends_at_the_last_consumed_token",
        ],
        "look-back window sized for one token per step": [
            "tests/unit/serving/test_stops.py::test_b17_stop_at_every_offset_of_runs_of_every_length",
            "tests/conformance/test_stops.py::test_b17_b18_output_is_the_plain_one_cut_at_the_stop",
        ],
        "character cut not mapped back to tokens": [
            "tests/unit/serving/test_stops.py::test_same_as_searching_the_whole_text_after_each_token",
            "tests/conformance/test_stops.py::test_b17_b18_output_is_the_plain_one_cut_at_the_stop",
        ],
    },
    "structured outputs": {
        "one mask reused across draft positions": [
            "tests/conformance/test_grammar.py::test_b20_every_row_is_masked_by_its_own_prefix",
            "tests/conformance/test_grammar.py::test_emitted_tokens_follow_the_masked_law",
        ],
        "stale drafts survive preemption": [
            "tests/conformance/test_grammar.py::test_b21_drafts_of_an_earlier_state_are_rejected_like_any_other",
            "tests/conformance/test_grammar.py::test_a_slot_that_is_used_again_is_free_of_the_old_masks",
            "tests/unit/serving/test_engine_faults.py::"
            "test_b21_grammar_goes_on_after_preemption_with_drafts_of_its_new_state",
        ],
        "grammar-invalid drafts handled as errors": [
            "tests/conformance/test_grammar.py::"
            "test_b22_drafts_that_are_forbidden_at_the_second_place_are_silent_rejections",
            "tests/unit/serving/test_grammar.py::test_forbidden_tokens_are_refused_silently",
        ],
    },
    "penalties": {
        "per-round instead of per-token bookkeeping": [
            "test_penalties_count_every_emitted_token_once",
            "test_minimum_length_counts_tokens",
        ],
        "shallow copy of mutable state": ["test_penalties_count_every_emitted_token_once"],
    },
    "sampling law": {
        "dtype mismatch between draw and q": ["test_the_kept_law_is_the_drawn_one"],
        "temperature not passed to the proposal law": ["test_point_mass_drafts_keep_the_law"],
        "filter missing on verified rows": ["test_emitted_law_with_good_drafts"],
        "padded proposals with invented probabilities; shared fixed K": ["test_lanes_with_their_own_ceilings"],
        "verification rows shifted by one": ["test_wrong_drafts_are_never_accepted"],
        "missing verification, or different arithmetic at width 1 and width W": ["test_greedy_equals_plain_decoding"],
    },
    "randomness": {
        "global RNG in the acceptance path": ["test_same_seed_gives_same_tokens_anywhere"],
        "draft draws outside the request's stream": ["test_same_seed_gives_same_tokens_anywhere"],
        "indexing copy instead of view": ["test_same_seed_gives_same_tokens_anywhere"],
        "RNG advanced by drafts, not by committed tokens": [
            "test_every_draw_uses_the_words_of_its_position",
            "test_continuation_depends_on_position_only",
        ],
        "unsynchronised RNG across ranks": [
            "tests/conformance/test_ranks.py::test_ranks_whose_logits_differ_in_the_last_bits_agree_or_stop_together",
            "tests/conformance/test_ranks.py::test_ranks_that_draw_other_tokens_are_always_noticed",
        ],
    },
    "capture and batching": {
        "padding metadata not neutralised": [
            "test_live_and_dead_lanes_at_every_position",
            "test_finished_requests_do_nothing",
        ],
        "off-by-one in capacity": [
            "test_context_end",
            "tests/unit/state/test_pages.py::test_shortage_names_the_numbers_and_changes_nothing",
        ],
        "per-width metadata layout differs": [
            "test_width_sequences_equal_plain_decoding",
            "tests/conformance/test_width_switching.py::test_b43_switching_widths_equals_plain_decoding",
        ],
    },
    "prefixes": {
        "recurrent state and draft history restored at different lengths": [
            "test_snapshots_continue_elsewhere",
            "test_state_at_a_crossed_page_boundary",
            "tests/conformance/test_prefix.py::test_b44_prompts_that_share_prefixes_around_a_block",
        ],
        "several cache groups negotiate down to zero": [
            "tests/conformance/test_prefix.py::test_b46_identical_prompt_twice_is_reused_wholly",
        ],
        "publication before acknowledgement": [
            "tests/conformance/test_prefix_publication.py::test_b47_rounds_in_flight_publish_nothing",
        ],
        "draft features missing for cached tokens": [
            "test_proposals_depend_on_committed_tokens_only",
            "tests/conformance/test_prefix.py::test_b48_equal_prompts_get_equal_proposals_with_the_cache_on_and_off",
        ],
    },
    "logprobs and metrics": {
        "logprobs not read from verify rows": ["test_logprobs_are_those_of_the_deciding_rows"],
        "buffer reused before its last reader": [
            "test_prompt_chunkings_leave_the_same_state",
            "test_poison_leaves_proposals_as_they_are",
            "test_prompt_scores_do_not_depend_on_chunking",
            "test_prompt_scores_are_those_of_verification",
            "tests/conformance/test_prompt_scores.py::test_b51_prompt_scores_equal_the_oracle",
            "tests/conformance/test_prompt_scores.py::"
            "test_b51_a_drafter_that_overwrites_hidden_states_changes_no_score",
        ],
        "pending token counted as draft": [
            "test_state_of_plain_rounds",
            "tests/unit/serving/test_metrics_cases.py::test_rates_use_offered_drafts_whatever_the_width",
            "tests/unit/serving/test_metrics_cases.py::test_width_one_rounds_add_nothing_to_the_denominator",
            "tests/unit/serving/test_generate.py::test_offered_counts_only_drafts_that_the_budget_can_still_emit",
        ],
    },
    "lifecycle": {
        "late completion applied to a reset request": [
            "test_late_records_are_recognised",
            "tests/unit/serving/test_generate.py::test_late_records_are_dropped",
            "tests/unit/scheduling/test_scheduler_rules.py::"
            "test_b54_b56_late_records_of_a_slot_that_has_another_request_are_dropped",
            "tests/unit/serving/test_engine_faults.py::test_b54_b56_completions_of_a_request_that_is_gone_are_dropped",
            "tests/unit/serving/test_engine.py::test_cancellation_in_every_phase_leaks_nothing",
        ],
        "accounting assumes at least one emitted token": [
            "test_two_rounds_in_flight",
            "tests/unit/scheduling/test_scheduler_rules.py::test_b55_records_without_tokens_are_counted",
            "tests/unit/serving/test_metrics_cases.py::test_a_record_without_tokens_is_legal",
            "tests/unit/serving/test_metrics_cases.py::test_a_record_that_was_dropped_is_not_counted",
        ],
        "row index used as identity": [
            "test_live_and_dead_lanes_at_every_position",
            "test_late_records_are_recognised",
            "tests/unit/scheduling/test_scheduler_rules.py::"
            "test_b54_b56_late_records_of_a_slot_that_has_another_request_are_dropped",
            "tests/unit/serving/test_engine_faults.py::test_b54_b56_completions_of_a_request_that_is_gone_are_dropped",
        ],
        "draft limit not enforced per request": [
            "test_context_end",
            "tests/unit/serving/test_engine_faults.py::"
            "test_b57_each_request_has_its_own_draft_limit_up_to_the_last_position",
            "tests/unit/scheduling/test_scheduler_rules.py::"
            "test_b57_the_draft_limit_of_a_request_holds_to_the_end_of_the_context",
        ],
        "padding rows treated as tokens": [
            "test_ids_outside_the_vocabulary_are_rejected",
            "test_padded_vocabulary_is_never_proposed",
        ],
        "drafter state crosses request boundaries": [
            "test_a_slot_forgets_its_earlier_owner",
            "tests/unit/drafting/test_history.py::test_no_gram_and_no_copy_crosses_responses",
            "tests/unit/drafting/test_history.py::test_a_preempted_response_goes_on_where_it_was",
            "tests/unit/drafting/test_history.py::test_what_was_asked_for_is_not_stored",
        ],
        "those who run are passed over for ever": [
            "tests/unit/scheduling/test_scheduler_rules.py::test_a_flood_of_short_requests_stops_nobody",
            "tests/unit/scheduling/test_scheduler_rules.py::test_lanes_that_the_host_decides_about_stay_together",
        ],
        "something is told of a request behind its end": [
            "tests/unit/scheduling/test_scheduler_rules.py::"
            "test_what_was_collected_comes_before_the_word_that_it_was_cancelled",
        ],
    },
}

#: Reports of stops, grammars, copies, figures and lives of requests, by the numbers that test names use.
NUMBERS = {
    "b15": "stop check sees only the last committed token",
    "b17": "look-back window sized for one token per step",
    "b18": "character cut not mapped back to tokens",
    "b19": "presentation clipped, transaction not",
    "b20": "one mask reused across draft positions",
    "b21": "stale drafts survive preemption",
    "b22": "grammar-invalid drafts handled as errors",
    "b43": "per-width metadata layout differs",
    "b49": "drafter state crosses request boundaries",
    "b50": "logprobs not read from verify rows",
    "b51": "buffer reused before its last reader",
    "b53": "pending token counted as draft",
    "b54": "late completion applied to a reset request",
    "b55": "accounting assumes at least one emitted token",
    "b56": "row index used as identity",
    "b57": "draft limit not enforced per request",
    "b58": "padding rows treated as tokens",
}


class Suite(QwenConformance, RoundConformance):
    """Never collected; its name has no ``Test``."""


CASES = [(fault, test) for section in FAULTS.values() for fault, tests in section.items() for test in tests]


@pytest.mark.parametrize(("fault", "test"), CASES)
def test_the_named_test_exists_and_names_its_class(fault: str, test: str) -> None:
    path, _, name = test.rpartition("::")
    if not path:
        documentation = " ".join((Suite.standard_tests()[name].__doc__ or "").split())
        assert fault.lower() in documentation.lower(), f"{name} does not say that it catches: {fault}"
        return
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert name in names, f"{path} has no test {name}"


@pytest.mark.parametrize(("number", "fault"), NUMBERS.items())
def test_every_numbered_report_has_its_tests(number: str, fault: str) -> None:
    (tests,) = [section[fault] for section in FAULTS.values() if fault in section]
    assert tests
    # a test that names numbers belongs to the classes of those
    for test in tests:
        named = re.findall(r"_(b\d\d)(?=_)", test)
        assert not named or number in named or {NUMBERS.get(one) for one in named} == {None}, test
