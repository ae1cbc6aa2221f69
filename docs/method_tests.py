"""Which test shows what of each method: its claim, and the setting with which it has no effect.

A test is named by its file and its function without "test_".  Where a method has no setting without effect, the reason
is given instead.  A recipe that is not listed is shown by the first test of tests/methods/test_RECIPE.py.
"""

from __future__ import annotations

CLAIMS = {
    "adaptive_dvw": "methods/adaptive_frequency: adaptive_training_only_ever_stops_earlier",
    "afl": "methods/fairness: afl_ends_where_the_largest_loss_is_smallest",
    "apfl": "methods/personal_models: the_mixtures_of_apfl_fit_their_clients_and_weights_stay_between_0_and_1",
    "async_dvw": "methods/metis: the_exchange_is_counted_as_in_the_paper",
    "async_fedavg": "methods/metis: the_cache_is_the_mean_of_last_models",
    "cfl": "methods/clustering: cfl_cuts_where_updates_pull_apart",
    "cgau": "methods/cgau: private_rows_are_the_matrix_if_nothing_is_averaged",
    "distfl": "methods/clustering: distfl_finds_planted_clusters_and_keeps_their_numbers",
    "ditto": "contract/invariants: personal_models_leave_the_global_model_alone",
    "dp_sgd": "methods/dp_sgd: one_row_moves_a_step_by_no_more_than_the_clip",
    "fedadam": "methods/aggregation: adaptive_steps_are_the_papers_formulas",
    "fedala": "methods/drift: fedala_starts_from_what_serves_the_client",
    "fedamp": "methods/drift: fedamp_listens_to_those_that_are_alike",
    "fedasync": "methods/metis: a_stale_update_moves_the_global_model_less",
    "fedavg": "methods/aggregation: the_mean_is_that_of_a_plain_loop",
    "fedavgm": "methods/aggregation: server_momentum",
    "fedbabu": "methods/personal_heads: the_head_of_fedbabu_stays_what_it_was_and_that_of_fedrep_does_not",
    "fedbn": "methods/what_stays: layers_that_stay_differ_and_all_others_are_the_same_for_everybody",
    "fedbuff": "methods/metis: buffered_steps_at_every_k_results",
    "feddecorr": "methods/drift: feddecorr_keeps_features_from_correlating",
    "feddyn": "methods/feddyn: it_reaches_the_minimum_of_all_where_fedavg_does_not",
    "fedlc": "methods/drift: fedlc_unlearns_less_of_a_class_that_a_client_lacks",
    "fedmd": "methods/fedmd: outputs_for_public_rows_come_nearer_to_one_another",
    "fednova": "methods/fednova: clients_of_unequal_speed_do_not_bias_it",
    "fedphp": "methods/drift: fedphp_learns_the_features_of_the_inherited_model",
    "fedproto": "methods/fedproto: features_of_a_class_come_nearer_to_one_another",
    "fedprox": "methods/training: the_proximal_term_of_fedprox",
    "fedrep": "methods/personal_heads: models_are_those_of_the_papers_algorithm",
    "fedrod": "methods/fedrod: with_balance_a_client_unlearns_less_and_its_own_head_knows_the_rest",
    "fedsam": "methods/drift: fedsam_ends_where_the_loss_is_flatter",
    "fedyogi": "methods/aggregation: adaptive_steps_are_the_papers_formulas",
    "fine_tuned": "contract/invariants: personal_models_leave_the_global_model_alone",
    "flexlora": "methods/adapter_ranks: the_mean_of_the_changes_keeps_what_nobody_was_sent",
    "hdafl": "methods/what_stays: layers_that_stay_differ_and_all_others_are_the_same_for_everybody",
    "heterofl": "methods/heterofl: each_number_is_averaged_over_those_who_have_it",
    "hierfavg": "methods/regions: several_rounds_are_the_plain_program",
    "ifca": "methods/clustering: ifca_finds_planted_clusters_given_their_number",
    "lg_fedavg": "methods/what_stays: layers_that_stay_differ_and_all_others_are_the_same_for_everybody",
    "local": "methods/what_stays: layers_that_stay_differ_and_all_others_are_the_same_for_everybody",
    "moon": "methods/drift: moon_trains_towards_the_features_of_the_global_model",
    "per_fedavg": "methods/personal_models: per_fedavg_is_better_after_one_step_than_fedavg_is",
    "pfedme": "methods/personal_models: the_personal_models_of_pfedme_minimize_the_loss_near_the_global_one",
    "qfedavg": "methods/fairness: q_fedavg_ends_where_the_sum_of_powers_is_smallest",
    "scaffold": "methods/training: scaffold_finds_the_optimum_that_fedavg_misses",
    "silobn": "methods/drift: silobn_keeps_statistics_and_shares_scale_and_shift",
    "sync_dvw": "methods/metis: weights_are_scores_on_all_clients_validation_rows",
    "term": "methods/fairness: term_ends_where_the_tilted_loss_is_smallest",
}

_CONTRACT = "contract/invariants: settings_without_effect_equal_fedavg"
_GLOBAL = "contract/invariants: settings_without_effect_leave_the_global_model"
_PERSONAL = "methods/personal_models: settings_without_effect_leave_fedavg"
_FAIR = "methods/fairness: without_effect_they_are_fedavg"
_HEADS = "methods/personal_heads: heads_that_nobody_has_leave_fedavg"
_BESIDE = "contract/invariants: personal_models_leave_the_global_model_alone"

WITHOUT_EFFECT = {
    "adaptive_dvw": "none: it is asynchronous, so there is no FedAvg to be",
    "afl": _FAIR,
    "apfl": _PERSONAL,
    "async_dvw": "none: it is asynchronous, so there is no FedAvg to be",
    "async_fedavg": "none: it is asynchronous, so there is no FedAvg to be",
    "cfl": _CONTRACT,
    "cgau": _CONTRACT,
    "distfl": "methods/clustering: iid_clients_stay_together",
    "ditto": "contract/invariants: ditto_without_lam_is_local_training",
    "dp_sgd": "none: batches are drawn otherwise, also without noise",
    "fedadam": _GLOBAL,
    "fedala": _BESIDE,
    "fedamp": "methods/drift: fedamp_without_others_is_local_training",
    "fedasync": "none: it is asynchronous, so there is no FedAvg to be",
    "fedavg": "none: what the others are compared with",
    "fedavgm": _CONTRACT,
    "fedbabu": _HEADS,
    "fedbn": "none: a model without batch norm is refused",
    "fedbuff": "none: it is asynchronous, so there is no FedAvg to be",
    "feddecorr": _CONTRACT,
    "feddyn": "none: the server's correction does not vanish with alpha",
    "fedlc": _CONTRACT,
    "fedmd": "methods/fedmd: without_digestion_clients_train_alone_to_the_bit",
    "fednova": _GLOBAL,
    "fedphp": _BESIDE,
    "fedproto": "methods/fedproto: without_the_term_clients_train_alone_to_the_bit",
    "fedprox": _CONTRACT,
    "fedrep": _HEADS,
    "fedrod": "methods/fedrod: without_balance_the_shared_model_of_fedrod_is_that_of_fedavg",
    "fedsam": _CONTRACT,
    "fedyogi": _GLOBAL,
    "fine_tuned": _BESIDE,
    "flexlora": "methods/adapter_ranks: models_and_changes_are_the_same_where_all_have_one_rank",
    "hdafl": _CONTRACT,
    "heterofl": "methods/heterofl: with_one_width_it_is_fedavg_to_the_bit",
    "hierfavg": "methods/regions: one_round_in_each_region_is_fedavg",
    "ifca": "none: also one cluster begins with another model than FedAvg",
    "lg_fedavg": _CONTRACT,
    "local": "none: nothing leaves a client",
    "moon": _CONTRACT,
    "per_fedavg": _PERSONAL,
    "pfedme": _PERSONAL,
    "qfedavg": _FAIR,
    "scaffold": _GLOBAL,
    "silobn": _CONTRACT,
    "sync_dvw": "none: power must be above 0, so scores count",
    "term": _FAIR,
}

# What the tests compare with the paper's equations, of recipes that benchmarks/crosscheck does not have.
EQUATIONS = {
    "adaptive_dvw": "methods/adaptive_frequency: a_client_stops_where_another_cycle_does_not_help",
    "async_dvw": "methods/metis: above_chance_and_power_sharpen",
    "async_fedavg": "methods/metis: the_cache_is_the_mean_of_last_models",
    "distfl": "methods/distribution_knowledge: the_loss_is_that_of_the_paper",
    "sync_dvw": "methods/metis: weights_are_scores_on_all_clients_validation_rows",
}
