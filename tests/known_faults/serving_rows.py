"""Faults of what leaves the trainer: engines, exports, merges, configs."""

from __future__ import annotations

from known_faults.row import Row

_SDK = "tests/sdk"
_QWEN3 = "plugins/qwen3/tests"
_QWEN36_MOE = "plugins/qwen36_moe/tests"
_INKLING = "plugins/inkling/tests"
_HARNESS = "tests/harness"
_OFFLINE = "tests/offline"
_SERVING = "tests/serving"
_SGLANG = "tests/sglang"

SERVING = {
    "B24": Row(
        cure="a package holds every factor under its own name in memory of its own, and scales no tensor",
        tests=(
            f"{_SGLANG}/test_sync_adapter.py::test_a_random_adapter_on_every_target_answers_as_peft",
            f"{_SGLANG}/test_sync_adapter.py::test_the_trainers_tensors_stay_its_own",
            f"{_HARNESS}/test_sglang_package.py::test_a_package_holds_every_tensor_with_its_checksum",
            f"{_HARNESS}/test_sglang_package.py::test_tensors_that_the_engine_would_misuse",
        ),
    ),
    "B25": Row(
        cure="a site declares the order of its projections; the branch and the base read that one order",
        mutants=("gate-and-up-swapped", "halves-declared-in-the-wrong-order"),
    ),
    "B26": Row(
        cure="what the engine leaves out of a linear is pinned at zero; with content it is refused, never dropped",
        tests=(
            f"{_SDK}/test_pinned_modules.py::test_pinned_rows_stay_exactly_zero",
            f"{_HARNESS}/test_engine_capabilities.py::test_what_sglang_leaves_out_of_a_linear_is_held_at_zero_in_adapter_mode_alone",
            f"{_HARNESS}/test_sglang_accepted.py::test_reasons_of_what_is_refused",
            f"{_SERVING}/test_sglang_names.py::test_b_and_a_rows_are_left_out_while_they_are_zero_and_refused_else",
            f"{_SGLANG}/test_sync_hybrid.py::test_an_adapter_on_all_that_is_served_with_pinned_gates",
            f"{_SGLANG}/test_engine_training.py::test_a_hybrid_is_one_policy",
        ),
        mutants=("pins-forgotten",),
    ),
    "B27": Row(
        cure="the serving form gives q, k and v of a delta net a copy of A each, and their rows of B",
        tests=(
            f"{_SERVING}/test_sglang_names.py::test_gated_delta_net_is_split_by_rows_of_b",
            f"{_SGLANG}/test_sync_hybrid.py::test_an_adapter_on_all_that_is_served_with_pinned_gates",
        ),
    ),
    "B28": Row(
        cure="parts of a packed linear are told apart by the declaration; an engine's groups are filled with zeros",
        tests=(
            f"{_SERVING}/test_sglang_names.py::test_a_group_with_a_part_missing_is_filled_with_zeros",
            f"{_SERVING}/test_sglang_names.py::test_up_alone_gets_a_gate_of_zeros",
            f"{_SERVING}/test_sglang_names.py::test_z_alone_gets_q_k_and_v_of_zeros",
        ),
        mutants=("lone-projection-taken-for-the-first", "neighbours-of-a-pinned-projection-are-held-too"),
    ),
    "B29": Row(
        cure="names are checked against PEFT's own scheme, imports against every expected tensor",
        tests=(
            f"{_SDK}/test_attachment.py::test_every_target_has_an_effect_and_a_gradient",
            f"{_SDK}/test_hybrid_base.py::test_adapter_names_are_those_of_the_checkpoint",
            f"{_SGLANG}/test_sync_adapter.py::test_a_random_adapter_on_every_target_answers_as_peft",
            f"{_SGLANG}/test_sync_merge.py::test_names_that_the_engine_passes_over_are_found_out",
        ),
        mutants=("prefix-missing", "layer-name-off-by-one", "missing-tensors-are-zeros", "exclusion-ignored"),
    ),
    "B30": Row(
        cure="each reader has a form of its own: PEFT's parameters of all experts, SGLang's names and stacks; what has "
        "no place there is refused",
        tests=(
            f"{_SERVING}/test_sglang_names.py::test_experts_of_each_layout",
            f"{_QWEN36_MOE}/test_hybrid_peft.py::test_there_and_back",
            f"{_OFFLINE}/test_export.py::test_sglangs_form",
            f"{_OFFLINE}/test_merge_plugins.py::test_the_same_weights",
            f"{_SGLANG}/test_exported_adapter.py::test_the_engine_answers_as_peft",
            f"{_SGLANG}/test_sync_hybrid.py::test_an_adapter_on_all_that_is_served_with_pinned_gates",
        ),
    ),
    "B31": Row(
        cure="attach and the base loader count every rank's experts; an adapter must have each",
        tests=(
            f"{_QWEN36_MOE}/test_hybrid_peft.py::test_peft_computes_what_folded_weights_compute",
            f"{_HARNESS}/test_hybrid_runs.py::test_the_local_engine_samples_the_policy_that_is_trained",
            f"{_SDK}/test_expert_branch.py::test_a_host_that_cannot_carry_the_adapter_is_refused_unchanged",
            f"{_SDK}/test_expert_files.py::test_what_does_not_fit_is_refused_with_nothing_written",
            f"{_SDK}/test_expert_base_weights.py::test_what_does_not_fit_is_refused_with_nothing_written",
            f"{_SGLANG}/test_sync_hybrid.py::test_merged_weights_have_every_linear_and_zeros_give_the_base_back",
            f"{_SGLANG}/test_engine_training.py::test_a_hybrid_is_one_policy",
        ),
    ),
    "B32": Row(
        cure="B is [out, rank] in HF order; transposed or interleaved B's are refused or seen; exports are copies",
        tests=(
            f"{_SDK}/test_branch_algebra.py::test_output_and_gradients_equal_the_folded_model",
            f"{_QWEN3}/test_lora_forward.py::test_equals_peft_and_the_folded_model",
        ),
        mutants=("rows-concatenated-not-grouped", "b-read-transposed", "export-transposed-in-memory"),
    ),
    "B33": Row(
        cure="an import compares every shape, so a transposed factor is refused",
        tests=(
            f"{_QWEN36_MOE}/test_hybrid_peft.py::test_peft_computes_what_folded_weights_compute",
            f"{_SDK}/test_peft_import_errors.py::test_a_tensor_that_does_not_fit_is_named",
            f"{_SDK}/test_expert_files.py::test_what_does_not_fit_is_refused_with_nothing_written",
            f"{_SDK}/test_expert_base_weights.py::test_what_does_not_fit_is_refused_with_nothing_written",
        ),
        mutants=("a-read-transposed", "b-read-transposed", "experts-in-reverse"),
    ),
    "B34": Row(
        cure="`LoraConfig.scale` and `use_rslora` in the exported and the imported config",
        tests=(
            f"{_SDK}/test_lora_config.py::test_rslora_scales_with_the_square_root_of_the_rank",
            f"{_SDK}/test_peft_export.py::test_rslora_is_in_the_config",
            f"{_QWEN3}/test_gradients_folded.py::test_rslora",
        ),
        mutants=("rslora-ignored", "rslora-not-exported", "scale-exported-as-alpha"),
    ),
    "B35": Row(
        cure="each merge reads the pristine base from its files and sums in float32; there is no unmerge; the engine's "
        "checksums of all weights are compared",
        tests=(
            f"{_OFFLINE}/test_merge_values.py::test_sums_are_made_in_float32_and_rounded_once",
            f"{_OFFLINE}/test_merge_experts.py::test_sums_of_fused_experts_are_rounded_once",
            f"{_OFFLINE}/test_cli_offline.py::test_unmerge_is_refused_with_a_way_out",
            f"{_SGLANG}/test_sync_merge.py::test_merged_weights_answer_as_peft_and_thirty_merges_do_not_drift",
            f"{_SGLANG}/test_sync_merge.py::test_an_engine_with_other_weights_is_refused",
            f"{_SGLANG}/test_sync_merge.py::test_an_engine_that_outlives_the_run_gets_the_base_back",
            f"{_HARNESS}/test_sglang_package.py::test_a_base_that_changed_is_not_merged_into",
        ),
    ),
    "B36": Row(
        cure="the set of tensors is that of the version before; the engine lists the name and compares every checksum",
        tests=(
            f"{_HARNESS}/test_sglang_package.py::test_a_package_holds_every_tensor_with_its_checksum",
            f"{_HARNESS}/test_sglang_package.py::test_a_version_that_lost_a_layer",
            f"{_SGLANG}/test_sync_adapter.py::test_a_random_adapter_on_every_target_answers_as_peft",
            f"{_SGLANG}/test_sync_chaos.py::test_adapter_mode_survives",
        ),
    ),
    "B37": Row(
        cure="`serving()` stamps every request with the version whose adapter it names, or whose weights must answer",
        tests=(
            f"{_SGLANG}/test_sync_adapter.py::test_twenty_flips_under_load",
            f"{_SGLANG}/test_sync_adapter.py::test_two_versions_in_flight",
            f"{_SGLANG}/test_sync_merge.py::test_weights_from_elsewhere_are_not_taken_for_the_policys",
            f"{_HARNESS}/test_sglang_versions.py::test_no_request_starts_while_weights_change",
        ),
    ),
    "B38": Row(
        cure="engines are never put to sleep (the config refuses it); one that lost its memory gets base, then version",
        tests=(f"{_SGLANG}/test_sync_merge.py::test_a_memory_release_from_outside_loses_nothing",),
        open="waking an engine: the harness has no such mode, and SGLang's release ends an engine on a CPU",
    ),
    "B39": Row(
        cure="a version's name never comes back, so that no cached prefix can belong to another",
        tests=(
            f"{_SGLANG}/test_sync_adapter.py::test_twenty_flips_under_load",
            f"{_SGLANG}/test_sync_adapter.py::test_a_name_never_comes_back",
            f"{_SGLANG}/test_sync_adapter.py::test_another_runs_policy_is_not_taken_over",
            f"{_HARNESS}/test_sglang_versions.py::test_numbers_do_not_come_back",
        ),
    ),
    "B40": Row(
        cure="`Versions` counts the requests of each version: one in use stays, and no more than `keep` are loaded",
        tests=(
            f"{_SGLANG}/test_sync_adapter.py::test_twenty_flips_under_load",
            f"{_SGLANG}/test_sync_adapter.py::test_two_versions_in_flight",
            f"{_HARNESS}/test_sglang_versions.py::test_a_version_in_use_is_never_superseded",
            f"{_HARNESS}/test_sglang_versions.py::test_old_versions_bound_new_ones",
        ),
    ),
    "B41": Row(
        cure="engines are started for the adapter's own targets; ranks and scales are compared by value in one batch",
        tests=(
            f"{_SGLANG}/test_sync_adapter.py::test_twenty_flips_under_load",
            f"{_SGLANG}/test_sync_adapter.py::test_slots_of_several_ranks_and_scales",
            f"{_HARNESS}/test_sglang_package.py::test_what_the_engines_were_not_started_for",
        ),
    ),
    "B42": Row(
        cure="padding rows of the head are zero, trimmed on export and made again on import; a tied head is refused",
        tests=(
            f"{_QWEN3}/test_lora_head.py::test_padding_rows",
            f"{_QWEN3}/test_lora_head.py::test_tied_embeddings",
            f"{_QWEN3}/test_export_layouts.py::test_same_on_every_rank_of_every_topology",
            f"{_INKLING}/test_inkling_adapter.py::test_the_adapter_is_the_merged_checkpoint",
            f"{_INKLING}/test_inkling_adapter.py::test_warm_start_from_the_official_schema",
            f"{_SDK}/test_adapter_schema.py::test_rows_of_a_padded_vocabulary_are_cut",
            f"{_SDK}/test_adapter_schema.py::test_other_rows_than_padding_are_refused",
            f"{_OFFLINE}/test_merge_values.py::test_a_padded_vocabulary",
            f"{_OFFLINE}/test_merge_refusals.py::test_a_vocabulary_that_is_not_mere_padding",
            f"{_OFFLINE}/test_merge_refusals.py::test_a_tied_head",
        ),
        mutants=(
            "padding-exported",
            "padding-filled",
            "padding-of-the-checkpoint-kept",
            "padding-of-the-vocabulary-exported",
            "last-rank-padded-at-the-front",
        ),
    ),
    "B43": Row(
        cure="the reference is a frozen copy of the warm-start adapter, not the adapter switched off",
        tests=(
            f"{_HARNESS}/test_warm_start.py::test_the_reference_is_the_frozen_warm_start_adapter",
            f"{_SDK}/test_frozen_adapter.py::test_the_frozen_adapter_computes_and_the_live_one_comes_back",
        ),
    ),
    "B44": Row(
        cure="dropout acts in training mode only; the harness refuses dropout in a GRPO run",
        tests=(
            f"{_SDK}/test_dropout.py::test_off_in_eval_and_at_zero",
            f"{_HARNESS}/test_config.py::test_everything_wrong_is_shown_together",
        ),
        mutants=("dropout-in-evaluation",),
    ),
    "B45": Row(
        cure="`minimal_config` writes the keys of the first PEFT with safetensors; `use_rslora` only when it is set",
        tests=(
            f"{_SDK}/test_peft_export.py::test_config_is_minimal",
            f"{_OFFLINE}/test_export.py::test_every_peft_reads_the_config",
            f"{_OFFLINE}/test_export.py::test_other_ways_to_select_become_full_names",
        ),
    ),
}
