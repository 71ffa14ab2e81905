"""Faults of training: gradients, initial values, optimizers, checkpoints, parallel layouts."""

from __future__ import annotations

from known_faults.row import Row

_SDK = "tests/sdk"
_QWEN3 = "plugins/qwen3/tests"
_QWEN36_MOE = "plugins/qwen36_moe/tests"
_INKLING = "plugins/inkling/tests"
_HERE = "tests/known_faults"
_HARNESS = "tests/harness"
_OFFLINE = "tests/offline"

TRAINING = {
    "B1": Row(
        cure="`Region.sum_group` tags replicated factors under SP; `reduce_grads` sums what is tagged",
        tests=(
            f"{_SDK}/test_region.py::test_rule",
            f"{_QWEN3}/test_gradients_layouts.py::test_training_equals_one_process",
            f"{_QWEN3}/test_gradients_reductions.py::test_plain_backward_then_reduce_grads",
        ),
        mutants=("tag-dropped-from-column-a", "tag-dropped-from-row-b"),
    ),
    "B2": Row(
        cure="the branch's region, one pack for all directions, losses normalised over all ranks",
        tests=(
            f"{_QWEN3}/test_gradients_layouts.py::test_training_equals_one_process",
            f"{_SDK}/test_branch_algebra.py::test_output_and_gradients_equal_the_folded_model",
            f"{_HARNESS}/test_policy.py::test_topology_changes_nothing",
        ),
        mutants=("copy-region-missing", "rows-per-head-not-per-group", "average-over-dp-twice"),
    ),
    "B3": Row(
        cure="`reduce_grads` sums `main_grad` where there is one; no autograd hooks",
        tests=(
            f"{_QWEN3}/test_gradients_layouts.py::test_training_equals_one_process",
            f"{_QWEN3}/test_gradients_reductions.py::test_variants_of_the_gradient_buffers",
            f"{_SDK}/test_expert_training.py::test_training_equals_one_process",
        ),
        mutants=("reduction-of-grad-where-main-grad-counts", "reduction-in-the-first-step-only"),
    ),
    "B4": Row(
        cure="one coalesced sum for each group and dtype in a step; `ExpertRegion.sum_group` tags shared factors",
        tests=(
            f"{_HERE}/test_one_sum_a_step.py::test_one_sum_takes_all",
            f"{_SDK}/test_expert_sites.py::test_rows",
            f"{_SDK}/test_expert_training.py::test_training_equals_one_process",
            f"{_INKLING}/test_inkling_shared_factors.py::test_shared_factors_stay_the_same_on_every_rank",
        ),
        mutants=(
            "shared-factor-not-summed-over-experts",
            "shared-a-not-summed-over-experts",
            "shared-b-not-summed-over-experts",
            "shared-a-summed-over-etp-alone",
        ),
    ),
    "B5": Row(
        cure="`initial_factor` draws the full factor from the seed and the HF name alone",
        tests=(
            f"{_QWEN3}/test_export_layouts.py::test_same_on_every_rank_of_every_topology",
            f"{_SDK}/test_expert_training.py::test_training_equals_one_process",
            f"{_INKLING}/test_inkling_shared_factors.py::test_shared_factors_stay_the_same_on_every_rank",
        ),
        mutants=(
            "a-drawn-per-tensor-parallel-rank",
            "a-drawn-per-data-parallel-rank",
            "one-draw-for-all-experts",
            "shared-a-drawn-per-rank",
        ),
    ),
    "B6": Row(
        cure="the mark `allreduce` puts dense and expert factors into the gradient buffers of their own domains",
        tests=(
            f"{_HARNESS}/test_hybrid_runs.py::test_experts_over_ranks_give_the_curve_of_one_process",
            f"{_HERE}/test_parallel_state.py::test_dense_factors_follow_the_dense_data_parallel_domain",
            f"{_SDK}/test_run_facts.py::test_experts_may_live_in_a_data_parallel_domain_of_their_own",
            f"{_SDK}/test_expert_training.py::test_training_equals_one_process",
        ),
        mutants=(
            "reduction-over-the-wrong-group",
            "experts-in-the-dense-domain",
        ),
    ),
    "B7": Row(
        cure="`check_host` compares the host weight with the run's sizes; the branch passes dX on",
        tests=(
            f"{_HERE}/test_parallel_state.py::test_an_adapter_of_another_parallel_size_is_refused",
            f"{_SDK}/test_expert_branch.py::test_parallel_sizes_of_another_run_are_refused",
            f"{_SDK}/test_expert_training.py::test_training_equals_one_process",
        ),
        mutants=(
            "branch-input-detached",
            "replica-not-summed-over-etp",
        ),
    ),
    "B8": Row(
        cure="a row-parallel branch sums its r-wide product once; factors are not marked `sequence_parallel`; a linear "
        "that leaves its sum to its caller (shared-expert overlap) takes no adapter",
        tests=(
            f"{_QWEN36_MOE}/test_hybrid_build.py::test_overrides_that_would_change_the_policy",
            f"{_QWEN36_MOE}/test_hybrid_build.py::test_a_host_with_shared_expert_overlap_takes_no_adapter",
        ),
        mutants=("host-sums-again", "tag-on-complete-b", "row-sum-missing", "copy-region-doubled"),
    ),
    "B9": Row(
        cure="REPLICATED sites: no partition dim, sums over TP under SP",
        tests=(f"{_SDK}/test_replicated_world.py::test_replicated_site",),
    ),
    "B10": Row(
        cure="`full_initial_factor` bounds A by the full fan-in",
        tests=(
            f"{_SDK}/test_initial_factors.py::test_a_has_the_spread_of_the_full_fan_in",
            f"{_QWEN3}/test_export_layouts.py::test_same_on_every_rank_of_every_topology",
        ),
        mutants=("spread-of-the-local-fan-in",),
    ),
    "B11": Row(
        cure="`initial_factor` slices the full factor for its rank",
        tests=(
            f"{_SDK}/test_initial_factors.py::test_shards_of_a_row_parallel_a_differ",
            f"{_QWEN3}/test_export_layouts.py::test_same_on_every_rank_of_every_topology",
        ),
        mutants=("shards-drawn-alike",),
    ),
    "B12": Row(
        cure="`tensor_model_parallel` marks shards, `shared` copies among experts: the gradient norm counts each once",
        tests=(
            f"{_HARNESS}/test_policy.py::test_topology_changes_nothing",
            f"{_SDK}/test_expert_training.py::test_training_equals_one_process",
        ),
        mutants=(
            "shard-not-counted",
            "shared-factor-counted-by-every-rank",
        ),
    ),
    "B13": Row(
        cure="`tensor_model_parallel` is false on replicas, so that the gradient norm counts them once",
        tests=(
            f"{_SDK}/test_factor_attributes.py::test_attributes_follow_the_table",
            f"{_HARNESS}/test_policy.py::test_topology_changes_nothing",
        ),
        mutants=("replica-counted-twice",),
    ),
    "B14": Row(
        cure="factors are fp32 and stepped on in place: an import writes into the same memory, and there is no copy to "
        "refresh; what is not finite is not saved",
        tests=(
            f"{_SDK}/test_peft_export.py::test_an_import_keeps_the_parameters_in_place",
            f"{_HARNESS}/test_warm_start.py::test_the_reference_is_the_frozen_warm_start_adapter",
            f"{_HARNESS}/test_checkpoint_files.py::test_a_run_that_diverged_does_not_push_good_checkpoints_out",
        ),
        mutants=("stale-export", "export-from-before-the-steps"),
    ),
    "B15": Row(
        cure="a checkpoint holds both moments of every factor and AdamW's counter; there are no masters",
        tests=(
            f"{_HARNESS}/test_checkpoint_resume.py::test_resumed_run_equals_the_straight_one_bit_for_bit",
            f"{_SDK}/test_adam_moments.py::test_another_trainer_goes_on_bit_for_bit",
        ),
    ),
    "B16": Row(
        cure="factors and moments are saved whole, under HF names, and cut anew by the table of the loading run",
        tests=(
            f"{_HARNESS}/test_checkpoint_resume.py::test_resume_under_another_topology",
            f"{_HARNESS}/test_checkpoint_resume.py::test_weights_and_moments_are_resharded_bit_for_bit",
            f"{_HARNESS}/test_checkpoint_plugins.py::test_resume_under_another_topology",
            f"{_QWEN3}/test_dist_checkpointing.py::test_saved_here_and_loaded_there",
            f"{_SDK}/test_expert_sharded_state.py::test_saved_here_and_loaded_there",
        ),
    ),
    "B17": Row(
        cure="weights alone never touch the moments; step, rate and place in the data are one number, and the data "
        "that were trained on are compared",
        tests=(
            f"{_HARNESS}/test_warm_start.py::test_weights_alone_leave_the_moments_behind",
            f"{_HARNESS}/test_checkpoint_resume.py::test_resumed_run_equals_the_straight_one_bit_for_bit",
            f"{_HARNESS}/test_checkpoint_resume.py::test_weights_alone_begin_a_new_run",
            f"{_HARNESS}/test_checkpoint_start.py::test_changed_training_data_are_noticed",
        ),
    ),
    "B18": Row(
        cure="`sharded_state_dict` of an adapted linear gives each factor its own offsets and replica numbers",
        tests=(
            f"{_QWEN3}/test_dist_checkpointing.py::test_saved_here_and_loaded_there",
            f"{_SDK}/test_expert_sharded_state.py::test_saved_here_and_loaded_there",
            f"{_HARNESS}/test_checkpoint_resume.py::test_resume_under_another_topology",
            f"{_HARNESS}/test_checkpoint_resume.py::test_weights_and_moments_are_resharded_bit_for_bit",
        ),
    ),
    "B19": Row(
        cure="a pre-hook on the stack of layers makes the first recomputed block's input require a gradient",
        tests=(
            f"{_QWEN3}/test_lora_recompute.py::test_same_gradients",
            f"{_QWEN3}/test_lora_recompute.py::test_adapter_on_the_mlp_alone",
            f"{_HERE}/test_recompute_hook.py::test_every_factor_trains",
        ),
        mutants=("recompute-hook-missing", "branch-off-without-grad"),
    ),
    "B20": Row(
        cure="that hook is placed by path, whatever class stands there; the kit asserts every gradient",
        tests=(
            f"{_HERE}/test_recompute_hook.py::test_every_factor_trains",
            f"{_SDK}/test_attachment.py::test_every_target_has_an_effect_and_a_gradient",
        ),
        mutants=("branch-output-detached", "reduction-skipped"),
    ),
    "B21": Row(
        cure="reduction, export and import take a stage without factors as it is",
        tests=(f"{_QWEN3}/test_lora_partial_stages.py::test_targets_on_one_stage_only",),
    ),
    "B22": Row(
        cure="export joins all stages; attach refuses a table of which some layer is on no stage or on two",
        tests=(
            f"{_QWEN3}/test_export_layouts.py::test_same_on_every_rank_of_every_topology",
            f"{_QWEN3}/test_lora_disagreement.py::test_a_lost_layer",
            f"{_HERE}/test_stages.py::test_a_layer_on_no_stage_or_on_two_is_refused",
            f"{_SDK}/test_attachment.py::test_a_host_that_cannot_carry_the_adapter_is_refused_unchanged",
            f"{_HARNESS}/test_checkpoint_resume.py::test_resume_under_another_topology",
            f"{_HARNESS}/test_checkpoint_resume.py::test_weights_and_moments_are_resharded_bit_for_bit",
            f"{_OFFLINE}/test_merge_refusals.py::test_layers_that_were_lost",
        ),
        mutants=("one-stage-exported",),
    ),
    "B23": Row(
        cure="packs are declared per TP shard and resolved for each TP size",
        tests=(
            f"{_SDK}/test_pack.py::test_concat_puts_each_shards_gate_before_its_up",
            f"{_SDK}/test_pack.py::test_concat_splits_each_section_on_its_own",
            f"{_SDK}/test_packed_sites_world.py::test_branch_and_factors_of_a_packed_site",
            f"{_SDK}/test_hybrid_base.py::test_each_rank_loads_its_part",
            f"{_QWEN36_MOE}/test_hybrid_weights.py::test_every_parameter_is_the_one_copied_by_hand",
            f"{_SDK}/test_expert_base_weights.py::test_every_rank_gets_its_experts_and_its_shard",
            f"{_SDK}/test_expert_training.py::test_training_equals_one_process",
            f"{_QWEN3}/test_export_layouts.py::test_same_on_every_rank_of_every_topology",
        ),
        mutants=(
            "shard-halves-joined-in-the-wrong-order",
            "shards-joined-in-the-wrong-order",
            "sections-split-as-one",
            "experts-numbered-per-rank",
        ),
    ),
}
