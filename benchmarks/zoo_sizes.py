"""How small a model is: sizes by the names that configurations have for them, and what single types need besides."""

from __future__ import annotations

from typing import Any

ROWS, LENGTH, IMAGE, EXPERTS = 4, 16, 32, 4
SMALL = """
32 hidden_size d_model n_embd embed_dim dim encoder_embed_dim embedding_size projection_dim model_dim hidden_dim
32 word_embed_proj_dim text_embed_dim output_hidden_size out_hidden_size encoder_hidden_size decoder_hidden_size
32 attention_hidden_size neck_hidden_sizes conv_dim cross_attention_hidden_size width emb_dim n_embed
32 decoder_embed_dim qformer_hidden_size mm_hidden_size lru_width text_hidden_size projection_size
32 vision_hidden_size audio_hidden_size speech_hidden_size projector_hidden_size bottleneck_size
32 feature_projection_input_dim hidden_channels vision_feature_size d_inner_hidden text_hidden_dim
32 num_position_embeddings_per_side latent_dim connector_hidden_size abstractor_hidden_size
64 intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner ffn_hidden_size dim_feedforward
64 encoder_intermediate_size decoder_intermediate_size hidden_size_mlp mlp_dim shared_intermediate_size
64 mamba_intermediate_size intermediate_size_mlp
16 moe_intermediate_size shared_expert_intermediate_size expert_ffn_dim moe_shared_expert_intermediate_size
16 mamba_d_state state_size ssm_state_size mamba_d_head mamba_head_dim expert_hidden_size num_conv_pos_embeddings
16 block_size
4 num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads
4 encoder_num_attention_heads decoder_num_attention_heads n_routed_experts num_experts num_local_experts
4 moe_num_experts num_labels kv_n_heads linear_num_heads linear_num_value_heads mamba_n_heads encoder_num_heads
4 decoder_num_heads
2 num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers depth
2 num_decoder_layers num_key_value_heads num_experts_per_tok moe_k moe_topk top_k_experts n_group
2 encoder_num_hidden_layers decoder_num_hidden_layers attn_layer_period expert_layer_period
2 linear_num_key_heads num_conv_pos_embedding_groups attention_layers mamba_expand num_global_layers
2 encoder_num_layers decoder_num_layers num_blocks num_block_records num_experts_per_token moe_top_k
2 num_query_tokens num_kv_shared_layers n_input_layers
1 topk_group first_k_dense_replace attn_layer_offset expert_layer_offset n_shared_experts
3 conv_kernel_size conv_depthwise_kernel_size
1 num_expert_group num_group num_nextn_predict_layers mamba_n_groups moe_layer_start_index
8 head_dim d_kv attention_head_dim v_head_dim qk_nope_head_dim qk_rope_head_dim kv_lora_rank q_lora_rank
8 patch_size linear_key_head_dim linear_value_head_dim adapter_attn_dim global_head_dim num_mel_bins
8 sliding_window local_attention attention_window mamba_chunk_size chunk_size time_step_rank
8 hidden_size_per_layer_input index_head_dim d_head rotary_dim linear_head_dim
32 image_size img_size crop_size
64 max_position_embeddings n_positions max_source_positions max_target_positions max_seq_len max_sequence_length
32 reassemble_hidden_size d_latents v_channels qk_channels
8 num_latents context_size
4 num_queries latent_query_num
2 num_self_attends_per_block
192 patch_embed_hidden_size
96 entity_vocab_size vocab_size vocab_size_per_layer_input text_vocab_size
"""  # sizes, and the names that have them
SIZES = {name: int(size) for size, *names in map(str.split, SMALL.strip().splitlines()) for name in names}

M = "linear_attention"
DROP = object()  # the configuration's class chooses
# By model type, then by the place in its configuration.
BY_TYPE: dict[str, dict[str, Any]] = {
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "attention_layers": DROP},
    "xlstm": {"embedding_dim": DROP},
    "marian": {"decoder_vocab_size": 96},
    "reformer": {"axial_pos_embds": False, "attention_head_size": 8},
    "xmod": {"default_language": "en_XX"},
    "dory": {"num_hidden_layers": 6, "n_input_layers": 2, "n_recurrent_layers": 2, "n_output_layers": 2},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
    "zamba": {"num_hidden_layers": 5, "layers_block_type": [M, M, "hybrid", M, "hybrid"]},
    "zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": [M, "hybrid", M],
        "hybrid_layer_ids": [1],
        "mamba_headdim": 8,
        "attention_head_dim": 16,
        "attention_hidden_size": 64,
    },
    "longcat_flash": {"qk_head_dim": 16, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 16, "zero_expert_num": 2},
    "blt": {
        "encoder_hash_byte_group_vocab": 96,
        "encoder_hash_byte_group_size": [3],
        "encoder_config.hidden_size_global": 32,
        "decoder_config.hidden_size_global": 32,
    },
    "siglip2": {"vision_config.num_patches": 16},
    "gemma3": {"mm_tokens_per_image": 4},
    "shieldgemma2": {"mm_tokens_per_image": 4},
    "t5gemma2": {"encoder.mm_tokens_per_image": 4},
    "dia": {
        "decoder_config.cross_head_dim": 8,
        "decoder_config.cross_num_attention_heads": 4,
        "decoder_config.cross_num_key_value_heads": 2,
        "decoder_config.cross_hidden_size": 32,
    },
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "mllama": {
        "vision_config.vision_output_dim": 64,
        "vision_config.intermediate_layers_indices": [0],
        "text_config.cross_attention_layers": [1],
    },
    "moonshine": {"pad_token_id": 2},
    "neomme": {"rope_parameters.full_attention.partial_rotary_factor": 0.5},
    "glm4v_moe_text": {"rope_parameters.mrope_section": [2, 1, 1], "head_dim": 16},
    "blip-2": {"image_token_id": 50},
    "instructblip": {"image_token_id": 50},
    "instructblipvideo": {"video_token_id": 50, "image_token_id": 50},
    "voxtral": {"audio_token_id": 50},
    "encoder-decoder": {"pad_token_id": 0, "decoder_start_token_id": 2},
    "vision-encoder-decoder": {"pad_token_id": 0, "decoder_start_token_id": 2},
    "speech-encoder-decoder": {"pad_token_id": 0, "decoder_start_token_id": 2},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 51},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 51},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "cohere_compass_text": {
        "layer_types": ["full_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "esm": {"vocab_size": 96, "pad_token_id": 1, "mask_token_id": 4},
    "levit": {"patch_size": 16, "image_size": 64, "hidden_sizes": [32, 32, 32], "key_dim": [8, 8, 8], "down_ops": DROP},
    "llama4_vision_model": {
        "intermediate_size": 128,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
        "vision_output_dim": 32,
    },
    "dpt": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]},
    "mobilebert": {"embedding_size": 16},
}
