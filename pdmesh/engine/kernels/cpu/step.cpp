// One engine step on the CPU: the whole forward pass over a mixed batch, in one parallel region.
//
//     hidden = embed(tokens)
//     each layer:   prepare -> qkv -> rope + KV write -> attention -> prepare -> output -> prepare -> gate_up -> prepare -> down
//     logits = head(prepare(hidden[rows]))
//
// Stages are separated by barriers; within a stage the ranks share out tiles, tokens or attention items. Hidden states stay in
// float32; a product rounds its input rows to its weights' partner format ("prepare"). With few rows every rank prepares all rows
// for itself, which costs less than a barrier.
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <memory>
#include <mutex>

#include "abi.h"
#include "activations.h"
#include "adapters.h"
#include "attention_stage.h"
#include "buffers.h"
#include "experts.h"
#include "gemm.h"
#include "kv_copy.h"
#include "guest_worth.h"
#include "parallel.h"
#include "rows.h"
#include "tiles.h"

namespace pdmesh {
namespace {

constexpr int kFewRows = 3;        // up to here every rank prepares all rows itself
constexpr int kFewTokens = 16;     // up to here one rank writes a head's keys and values of all tokens

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

class Engine {
  public:
    // Engines may have one team: they compute in turn.
    Engine(const PdmeshModel& model, std::shared_ptr<Team> team)
        : model_(model), layers_(model.layers, model.layers + model.num_layers), shared_team_(std::move(team)), team_(*shared_team_),
          attention_(team_, pool_of(model), model.num_heads / model.num_kv_heads, has_window(layers_), shape_of(model)),
          adapters_(team_, model.num_layers, most_outputs(layers_)) {
        model_.layers = layers_.data();
        groups_ = model.num_heads / model.num_kv_heads;
        hidden_stride_ = round_up(model.hidden, 16);
        qkv_stride_ = round_up(model.layers[0].qkv.n, 16);
        for (int rank = 0; rank < team_.capacity(); rank++) {
            own_rows_.push_back(std::make_unique<RowBuffer>());
            head_groups_.emplace_back().reserve(model.num_heads);
            routers_.emplace_back();
            heads_.emplace_back(2 * model.head_dim);
        }
    }

    const std::shared_ptr<Team>& team() const { return shared_team_; }

    void step(const PdmeshStep& step) {
        std::lock_guard lock(mutex_);  // of the buffers; the team has its own
        step_ = &step;
        reserve(step.num_tokens);
        attention_.begin(step);
        adapters_.begin(step, kFewRows);
        profile_ = {};
        const int64_t start = now_ns();
        const bool had_guests = team_.run_with_guests(worth_.asks(step.num_tokens), [this](int rank, int place) { forward(rank, place); });
        profile_.total = now_ns() - start;
        worth_.note(step.num_tokens, had_guests, profile_.total);
        if (step.profile) *step.profile = profile_;
    }

  private:
    static KVGeometry pool_of(const PdmeshModel& model) {
        return {model.num_kv_heads, model.head_dim, model.block_size, model.kv_format, 0, nullptr};
    }
    static bool has_window(const std::vector<PdmeshLayer>& layers) {
        return std::any_of(layers.begin(), layers.end(), [](const PdmeshLayer& layer) { return layer.window != 0; });
    }
    // Of the products that adapters may add to.
    static int most_outputs(const std::vector<PdmeshLayer>& layers) {
        int most = 0;
        for (const PdmeshLayer& layer : layers)
            for (const PdmeshLinear* linear : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) most = std::max(most, linear->n);
        return most;
    }
    static AttentionShape shape_of(const PdmeshModel& model) {
        const float cap = model.attention_softcap * kLog2E;
        if (const PdmeshLatent* latent = model.layers[0].latent) return {latent->kv_rank + latent->rope_dim, latent->kv_rank, cap, true};
        return {model.head_dim, model.head_dim, cap, false};
    }

    void reserve(int num_tokens) {
        const size_t rows = num_tokens;
        hidden_.reserve(rows * hidden_stride_);
        qkv_.reserve(rows * qkv_stride_);
        if (!is_added_at_once()) branch_.reserve(rows * hidden_stride_);
        const auto for_rows_of = [&](const PdmeshLinear& linear, int num_rows) {
            shared_rows_.reserve(linear, num_rows);
            if (!has_own_rows_)
                for (auto& own : own_rows_) own->reserve(linear, kFewRows);
        };
        for (const PdmeshLayer& layer : layers_) {
            for (const PdmeshLinear* linear : {&layer.qkv, &layer.output}) for_rows_of(*linear, num_tokens);
            if (layer.latent) reserve_latent(*layer.latent, num_tokens, for_rows_of);
            if (layer.experts) reserve_experts(*layer.experts, num_tokens, for_rows_of);
            else reserve_mlp(layer.gate_up, layer.down, num_tokens, for_rows_of);
        }
        for_rows_of(model_.head, num_tokens);
        has_own_rows_ = true;
    }

    template <class ForRows>
    void reserve_mlp(const PdmeshLinear& gate_up, const PdmeshLinear& down, int num_rows, const ForRows& for_rows_of) {
        inner_.reserve(static_cast<size_t>(num_rows) * inner_stride(down));
        for_rows_of(gate_up, num_rows);
        for_rows_of(down, num_rows);
    }

    template <class ForRows>
    void reserve_latent(const PdmeshLatent& latent, int num_tokens, const ForRows& for_rows_of) {
        const size_t rows = num_tokens;
        if (latent.queries.n) for_rows_of(latent.queries, num_tokens);
        for_rows_of(latent.key_maps[0], num_tokens * model_.num_heads);
        for_rows_of(latent.value_maps[0], num_tokens * model_.num_heads);
        expanded_.reserve(rows * round_up(latent.queries.n, kPanel));
        absorbed_.reserve(rows * model_.num_heads * latent.kv_rank);
        values_.reserve(rows * values_stride(latent));
    }

    template <class ForRows>
    void reserve_experts(const PdmeshExperts& experts, int num_tokens, const ForRows& for_rows_of) {
        const size_t rows = num_tokens;
        for_rows_of(experts.router, num_tokens);
        reserve_mlp(experts.experts[0].gate_up, experts.experts[0].down, num_tokens * experts.top_k, for_rows_of);
        if (experts.shared) reserve_mlp(experts.shared->gate_up, experts.shared->down, num_tokens, for_rows_of);
        router_logits_.reserve(rows * round_up(experts.router.n, kPanel));
        contributions_.reserve(rows * experts.top_k * hidden_stride_);
        mixed_.reserve(rows * hidden_stride_);
        pairs_.reserve(experts, num_tokens);
        if (!has_own_rows_)
            for (Router& router : routers_) router.reserve(experts);
    }

    static int inner_stride(const PdmeshLinear& down) { return round_up(down.k, 16); }

    // Whether products add to the states, with nothing done to what attention and MLP give.
    bool is_added_at_once() const {
        return !model_.is_parallel && !layers_[0].post_attention_norm.weight && model_.residual_multiplier == 1.0f;
    }

    // ---- one rank's way through the step

    struct Clock {  // adds the time since the last mark to a stage
        int64_t last;
        bool is_on;
        void mark(int64_t& stage) {
            if (!is_on) return;
            const int64_t now = now_ns();
            stage += now - last;
            last = now;
        }
    };

    // `place`: the layer at whose beginning a guest joined; Team::kStart for all ranks that were there from the start.
    void forward(int rank, int place) {
        [[maybe_unused]] const TileSession tiles;
        Clock clock{now_ns(), rank == 0 && step_->profile};
        int num_rows = step_->num_tokens;
        const bool is_whole = step_->num_rows == step_->num_tokens;
        if (place == Team::kStart) begin(rank, clock);
        for (int index = std::max(place, 0); index < model_.num_layers; index++) {
            if (index > 0 && index != place) team_.boundary(index);
            const PdmeshLayer& layer = layers_[index];
            if (layer.query_norm.weight && model_.head_norms == kOverAllHeads) norm_all_heads(rank, layer);
            if (layer.latent) absorb_and_write(rank, index, layer, *layer.latent);
            else rotate_and_write(rank, index, layer);
            team_.barrier();
            if (rank == 0 && step_->layers_done) tell_layer_done(index);
            if (attention_.has_tails()) {
                attention_.gather_tails(index);
                team_.barrier();
            }
            clock.mark(profile_.rope);
            attention_.attend(rank, index, layer);
            team_.barrier();
            if (index == model_.num_layers - 1 && !is_whole) {  // from here on only the tokens whose logits are wanted matter
                if (rank == 0) keep_wanted_rows();
                num_rows = step_->num_rows;
                team_.barrier();
            }
            clock.mark(profile_.attention);
            if (num_rows == 0) break;
            const int block = rows_of_block(layer, num_rows);
            for (int first = 0; first < num_rows; first += block) {
                const Span span{first, std::min(block, num_rows - first)};
                add_attention(rank, index, layer, span, num_rows, clock);
                if (layer.experts) add_experts(rank, layer, *layer.experts, num_rows, clock);
                else add_mlp(rank, index, layer, span, num_rows, clock);
                if (index + 1 < model_.num_layers) project_inputs(rank, index + 1, span, num_rows, clock);
            }
        }
        if (num_rows == 0) return;
        if (step_->hidden) tell_hidden(rank);
        const Rows rows = prepare(rank, model_.head, hidden_.get(), hidden_stride_, model_.norm, step_->num_rows);
        multiply(team_, rank, model_.head, rows, step_->num_rows, Emitted{step_->logits, size_t(model_.vocab), model_.vocab});
        if (model_.logits_multiplier != 1.0f || model_.logits_softcap != 0) scale_logits(rank);
        clock.mark(profile_.head);
    }

    // Up to the first attention.
    void begin(int rank, Clock& clock) {
        embed(rank);
        team_.barrier();
        clock.mark(profile_.embed);
        project_inputs(rank, 0, {0, step_->num_tokens}, step_->num_tokens, clock);
    }

    // Rows [first, first + count) of a step.
    struct Span {
        int first, count;
    };

    // Between two attentions rows are independent: so many at a time that their states stay in a cache from product to product.
    // Adapters, experts and latent attention arrange all rows of a step at once.
    int rows_of_block(const PdmeshLayer& layer, int num_rows) const {
        constexpr int most = 512;
        if (num_rows <= most || adapters_.is_on() || layer.experts || layer.latent) return num_rows;
        const int blocks = (num_rows + most - 1) / most;
        return round_up((num_rows + blocks - 1) / blocks, kPanel);
    }

    // A layer's first product. Ends with a barrier.
    void project_inputs(int rank, int index, const Span& span, int num_rows, Clock& clock) {
        const PdmeshLayer& layer = layers_[index];
        const Adapted adapted = adapters_.of(index, kQkv, num_rows);
        const Rows rows = prepare(rank, layer.qkv, states(span), hidden_stride_, layer.input_norm, span.count, adapted);
        clock.mark(profile_.prepare);
        float* out = qkv_.get() + static_cast<size_t>(span.first) * qkv_stride_;
        multiply_layer(rank, layer.qkv, rows, span.count, Emitted{out, size_t(qkv_stride_), qkv_stride_}, adapted);
        team_.barrier();
        clock.mark(profile_.qkv);
    }

    float* states(const Span& span) const { return hidden_.get() + static_cast<size_t>(span.first) * hidden_stride_; }

    void add_attention(int rank, int index, const PdmeshLayer& layer, const Span& span, int num_rows, Clock& clock) {
        if (layer.latent) expand_values(rank, *layer.latent, num_rows);
        const float* values = layer.latent ? values_.get() : attention_.attended();
        const int stride = layer.latent ? values_stride(*layer.latent) : attention_.attended_stride();
        const Adapted adapted = adapters_.of(index, kOutput, num_rows);
        values += static_cast<size_t>(span.first) * stride;
        const Rows rows = prepare(rank, layer.output, values, stride, kNoNorm, span.count, adapted);
        clock.mark(profile_.prepare);
        add(rank, layer.output, rows, span, layer.post_attention_norm, model_.is_parallel, adapted);
        clock.mark(profile_.output);
    }

    void add_mlp(int rank, int index, const PdmeshLayer& layer, const Span& span, int num_rows, Clock& clock) {
        Adapted adapted = adapters_.of(index, kGateUp, num_rows);
        Rows rows = prepare(rank, layer.gate_up, states(span), hidden_stride_, norm_of_mlp(layer), span.count, adapted);
        clock.mark(profile_.prepare);
        with_activation(model_.activation, 0, inner_stride(layer.down), [&](auto emit) { multiply_layer(rank, layer.gate_up, rows, span.count, emit, adapted); });
        team_.barrier();
        clock.mark(profile_.gate_up);
        adapted = adapters_.of(index, kDown, num_rows);
        rows = prepare(rank, layer.down, inner_.get(), inner_stride(layer.down), kNoNorm, span.count, adapted);
        clock.mark(profile_.prepare);
        add(rank, layer.down, rows, span, layer.post_mlp_norm, false, adapted);
        clock.mark(profile_.down);
    }

    // In parallel, the MLP reads what attention read, and its norm may be attention's.
    const PdmeshNorm& norm_of_mlp(const PdmeshLayer& layer) const {
        return layer.mlp_norm.weight || !model_.is_parallel ? layer.mlp_norm : layer.input_norm;
    }

    // Visits with what emits a product's tiles to `inner_`.
    template <class Visit>
    void with_activation(int activation, float limit, size_t stride, const Visit& visit) const {
        if (!model_.is_gated) visit(Activated{inner_.get(), stride, activation});
        else if (activation == kSilu) visit(Gated{inner_.get(), stride});
        else visit(GatedBy{inner_.get(), stride, activation, limit});
    }

    void add_experts(int rank, const PdmeshLayer& layer, const PdmeshExperts& experts, int num_rows, Clock& clock) {
        choose_experts(rank, layer, experts, num_rows);
        clock.mark(profile_.prepare);
        const PdmeshExpert& first = experts.experts[0];
        const int stride = inner_stride(first.down);
        const auto state_of = [&](int pair) { return hidden_.get() + static_cast<size_t>(pairs_.tokens[pair]) * hidden_stride_; };
        const auto factor_of = [&](int pair) { return experts.scales_input ? pairs_.row_scores[pair] : 1.0f; };
        Rows rows = prepare_each(rank, first.gate_up, norm_of_mlp(layer), pairs_.num_pairs, state_of, factor_of);
        with_activation(experts.activation, experts.limit, stride, [&](auto emit) { multiply_groups(team_, pairs_.gate_up, rows, emit); });
        team_.barrier();
        clock.mark(profile_.gate_up);
        rows = prepare(rank, first.down, inner_.get(), stride, kNoNorm, pairs_.num_pairs);
        multiply_groups(team_, pairs_.down, rows, Emitted{contributions_.get(), size_t(hidden_stride_), hidden_stride_});
        team_.barrier();
        if (experts.shared) take_shared(rank, layer, *experts.shared, num_rows);
        mix_contributions(rank, layer, experts, num_rows);
        team_.barrier();
        clock.mark(profile_.down);
    }

    // Begins and ends with all ranks together.
    void choose_experts(int rank, const PdmeshLayer& layer, const PdmeshExperts& experts, int num_rows) {
        const size_t stride = round_up(experts.router.n, kPanel);
        const Rows rows = prepare(rank, experts.router, hidden_.get(), hidden_stride_, norm_of_mlp(layer), num_rows);
        multiply(team_, rank, experts.router, rows, num_rows, Emitted{router_logits_.get(), stride, experts.router.n});
        team_.barrier();
        for (int r = rank; r < num_rows; r += team_.size()) {
            const size_t at = static_cast<size_t>(r) * experts.top_k;
            routers_[rank].route(experts, router_logits_.get() + r * stride, &pairs_.chosen[at], &pairs_.scores[at]);
        }
        team_.barrier();
        if (rank == 0) pairs_.group(experts, num_rows);
        team_.barrier();
    }

    // The expert that every token takes, to `mixed_`. Ends with a barrier.
    void take_shared(int rank, const PdmeshLayer& layer, const PdmeshExpert& shared, int num_rows) {
        const int stride = inner_stride(shared.down);
        Rows rows = prepare(rank, shared.gate_up, hidden_.get(), hidden_stride_, norm_of_mlp(layer), num_rows);
        with_activation(model_.activation, 0, stride, [&](auto emit) { multiply(team_, rank, shared.gate_up, rows, num_rows, emit); });
        team_.barrier();
        rows = prepare(rank, shared.down, inner_.get(), stride, kNoNorm, num_rows);
        multiply(team_, rank, shared.down, rows, num_rows, Emitted{mixed_.get(), size_t(hidden_stride_), hidden_stride_});
        team_.barrier();
    }

    // Contributions in the order of the experts' numbers, then the shared expert's: into the states.
    void mix_contributions(int rank, const PdmeshLayer& layer, const PdmeshExperts& experts, int num_rows) {
        for (int r = rank; r < num_rows; r += team_.size()) {
            float* mixed = mixed_.get() + static_cast<size_t>(r) * hidden_stride_;
            const F gate = experts.has_shared_gate ? sigmoid(f_set(shared_gate_logit(experts, r))) : f_set(1.0f);
            for (int i = 0; i < hidden_stride_; i += 16) {
                F sum = f_zero();
                for (int p = r * experts.top_k; p < (r + 1) * experts.top_k; p++) {
                    const F factor = f_set(experts.scales_input ? 1.0f : pairs_.scores[p]);
                    sum = sum + f_load(contributions_.get() + static_cast<size_t>(pairs_.places[p]) * hidden_stride_ + i) * factor;
                }
                f_store(mixed + i, experts.shared ? sum + gate * f_load(mixed + i) : sum);
            }
            if (layer.post_mlp_norm.weight) norm_row(layer.post_mlp_norm, mixed, model_.hidden, mixed);
            add_row(r, mixed);
        }
    }

    float shared_gate_logit(const PdmeshExperts& experts, int row) const {
        return router_logits_.get()[static_cast<size_t>(row) * round_up(experts.router.n, kPanel) + experts.num_experts];
    }

    void add_row(int row, const float* added) {
        const F factor = f_set(model_.residual_multiplier);
        float* states = hidden_.get() + static_cast<size_t>(row) * hidden_stride_;
        const float* beside = model_.is_parallel ? branch_.get() + static_cast<size_t>(row) * hidden_stride_ : nullptr;
        for (int i = 0; i < hidden_stride_; i += 16) {
            F sum = f_load(states + i);
            if (beside) sum = sum + f_load(beside + i) * factor;
            f_store(states + i, sum + f_load(added + i) * factor);
        }
    }

    // A product becomes part of the states: as it is, normalized, or (`is_kept`) only together with the next one. Ends with a barrier.
    void add(int rank, const PdmeshLinear& linear, const Rows& rows, const Span& span, const PdmeshNorm& norm, bool is_kept, const Adapted& adapted) {
        const size_t stride = hidden_stride_;
        float* branch = is_added_at_once() ? nullptr : branch_.get() + span.first * stride;
        if (is_added_at_once()) {
            multiply_layer(rank, linear, rows, span.count, Added{states(span), stride}, adapted);
        } else if (norm.weight || is_kept) {
            multiply_layer(rank, linear, rows, span.count, Emitted{branch, stride, hidden_stride_}, adapted);
        } else {
            const float* beside = model_.is_parallel ? branch : nullptr;
            multiply_layer(rank, linear, rows, span.count, AddedScaled{states(span), beside, stride, model_.residual_multiplier}, adapted);
        }
        team_.barrier();
        if (!norm.weight) return;
        add_normed(rank, norm, span);
        team_.barrier();
    }

    // One of a layer's products, with what adapters add to it.
    template <class Emit>
    void multiply_layer(int rank, const PdmeshLinear& linear, const Rows& rows, int num_rows, const Emit& emit, const Adapted& adapted) {
        if (adapted) adapters_.multiply(rank, adapted, linear, rows, num_rows, emit);
        else multiply(team_, rank, linear, rows, num_rows, emit);
    }

    void add_normed(int rank, const PdmeshNorm& norm, const Span& span) {
        for (int r = span.first + rank; r < span.first + span.count; r += team_.size()) {
            float* added = branch_.get() + static_cast<size_t>(r) * hidden_stride_;
            norm_row(norm, added, model_.hidden, added);
            add_row(r, added);
        }
    }

    // The queries of a token are one row of a norm, its keys another. Ends with a barrier.
    void norm_all_heads(int rank, const PdmeshLayer& layer) {
        const int queries = model_.num_heads * model_.head_dim, keys = model_.num_kv_heads * model_.head_dim;
        for (int t = rank; t < step_->num_tokens; t += team_.size()) {
            float* row = qkv_.get() + static_cast<size_t>(t) * qkv_stride_;
            norm_row(layer.query_norm, row, queries, row);
            norm_row(layer.key_norm, row + queries, keys, row + queries);
        }
        team_.barrier();
    }

    // Begins with a barrier.
    void scale_logits(int rank) {
        team_.barrier();
        const int64_t count = static_cast<int64_t>(step_->num_rows) * model_.vocab, parts = team_.size();
        const F factor = f_set(model_.logits_multiplier), cap = f_set(model_.logits_softcap);
        for (int64_t i = count * rank / parts; i < count * (rank + 1) / parts; i += 16) {
            const int num = static_cast<int>(std::min<int64_t>(16, count * (rank + 1) / parts - i));
            float lanes[16] = {};
            std::memcpy(lanes, step_->logits + i, sizeof(float) * num);
            F x = f_load(lanes) * factor;
            if (model_.logits_softcap != 0) x = f_tanh(x / cap) * cap;
            f_store_first(step_->logits + i, x, num);
        }
    }

    // For pushes that send KV while the step still runs.
    void tell_layer_done(int index) const {
        __atomic_store_n(step_->layers_done, index + 1, __ATOMIC_RELEASE);  // libc++ has atomic_ref since LLVM 19 alone
        if (step_->signal_fd < 0 || ((index + 1) % step_->signal_every && index + 1 < model_.num_layers)) return;
        const char byte = 0;
        if (write(step_->signal_fd, &byte, 1) < 0) return;  // full: then its reader is awake as well
    }

    // What the wanted tokens' states are after the last layer.
    void tell_hidden(int rank) const {
        const size_t width = model_.hidden;
        for (int r = rank; r < step_->num_rows; r += team_.size())
            std::memcpy(step_->hidden + r * width, hidden_.get() + r * static_cast<size_t>(hidden_stride_), sizeof(float) * width);
    }

    void embed(int rank) {
        const int width = model_.hidden;
        for (int t = rank; t < step_->num_tokens; t += team_.size()) {
            float* out = hidden_.get() + static_cast<size_t>(t) * hidden_stride_;
            const int64_t first = step_->token_ids[t] * width;
            if (model_.embedding_format == kFloat32) {
                std::memcpy(out, reinterpret_cast<const float*>(model_.embedding) + first, sizeof(float) * width);
            } else {
                const auto* from = reinterpret_cast<const uint16_t*>(model_.embedding) + first;
                for (int i = 0; i < width; i++) {
                    const uint32_t bits = static_cast<uint32_t>(from[i]) << 16;
                    std::memcpy(out + i, &bits, 4);
                }
            }
            if (model_.embedding_multiplier != 1.0f)
                for (int i = 0; i < width; i++) out[i] *= model_.embedding_multiplier;
            if (model_.positions) {
                const float* position = model_.positions + step_->positions[t] * width;
                for (int i = 0; i < width; i++) out[i] += position[i];
            }
            for (int i = width; i < hidden_stride_; i++) out[i] = 0;
            if (model_.embedding_norm.weight) norm_row(model_.embedding_norm, out, width, out);
        }
    }

    // All rows, ready for `linear`. Ends with a barrier where the ranks shared the work.
    Rows prepare(int rank, const PdmeshLinear& linear, const float* x, int stride, const PdmeshNorm& norm, int num_rows) {
        return prepare_each(rank, linear, norm, num_rows, [&](int row) { return x + static_cast<size_t>(row) * stride; });
    }

    // The same, and rows that have adapters also in float32, where these are read.
    Rows prepare(int rank, const PdmeshLinear& linear, const float* x, int stride, const PdmeshNorm& norm, int num_rows, const Adapted& adapted) {
        if (!adapted) return prepare(rank, linear, x, stride, norm, num_rows);
        float* scratch = own_rows_[rank]->scratch.get();
        return share_rows(rank, linear, num_rows, [&](Rows& rows, int r) {
            const float* row = x + static_cast<size_t>(r) * stride;
            const int place = adapted.rows->places[r];
            if (place < 0) return prepare_row(linear, row, norm, scratch, rows, r);
            float* wide = adapters_.wide_row(rank, num_rows, place);
            if (norm.weight) norm_row(norm, row, linear.k, wide);
            else std::memcpy(wide, row, sizeof(float) * round_up(linear.k, kPanel));
            prepare_row(linear, wide, kNoNorm, scratch, rows, r);
        });
    }

    // `factor_of`: what a row is multiplied with, behind its norm.
    template <class Find, class Factor = float (*)(int)>
    Rows prepare_each(int rank, const PdmeshLinear& linear, const PdmeshNorm& norm, int num_rows, const Find& find, const Factor& factor_of = [](int) { return 1.0f; }) {
        float* scratch = own_rows_[rank]->scratch.get();
        return share_rows(rank, linear, num_rows, [&](Rows& rows, int r) { prepare_row(linear, find(r), norm, scratch, rows, r, factor_of(r)); });
    }

    template <class Prepare>
    Rows share_rows(int rank, const PdmeshLinear& linear, int num_rows, const Prepare& prepare) {
        if (num_rows <= kFewRows) {
            Rows rows = own_rows_[rank]->view(linear);
            for (int r = 0; r < num_rows; r++) prepare(rows, r);
            return rows;
        }
        Rows rows = shared_rows_.view(linear);
        const int begin = static_cast<int64_t>(num_rows) * rank / team_.size();
        const int end = static_cast<int64_t>(num_rows) * (rank + 1) / team_.size();
        for (int r = begin; r < end; r++) prepare(rows, r);
        team_.barrier();
        return rows;
    }

    // ---- latent attention

    // Where the queries of all heads of a token lie, [num_heads][nope_dim + rope_dim].
    const float* latent_queries(const PdmeshLatent& latent, int token) const {
        if (!latent.queries.n) return qkv_.get() + static_cast<size_t>(token) * qkv_stride_;
        return expanded_.get() + static_cast<size_t>(token) * round_up(latent.queries.n, kPanel);
    }
    int values_stride(const PdmeshLatent& latent) const { return round_up(model_.num_heads * latent.value_dim, kPanel); }

    // One group of rows for each head, [head][token].
    const std::vector<RowGroup>& group_by_head(int rank, const PdmeshLinear* maps, int num_tokens) {
        std::vector<RowGroup>& groups = head_groups_[rank];
        groups.clear();
        for (int head = 0; head < model_.num_heads; head++) groups.push_back({&maps[head], head * num_tokens, num_tokens});
        return groups;
    }

    // Queries, multiplied with the keys' maps, to where attention reads them; latents into the pool.
    [[gnu::noinline]] void absorb_and_write(int rank, int index, const PdmeshLayer& layer, const PdmeshLatent& latent) {
        const int num_tokens = step_->num_tokens, head_dim = latent.nope_dim + latent.rope_dim;
        if (latent.queries.n) {
            const size_t stride = round_up(latent.queries.n, kPanel);
            const Rows rows = prepare(rank, latent.queries, qkv_.get(), qkv_stride_, latent.query_norm, num_tokens);
            multiply(team_, rank, latent.queries, rows, num_tokens, Emitted{expanded_.get(), stride, latent.queries.n});
            team_.barrier();
        }
        const auto plain_of = [&](int row) { return latent_queries(latent, row % num_tokens) + row / num_tokens * head_dim; };
        const Rows rows = prepare_each(rank, latent.key_maps[0], kNoNorm, num_tokens * model_.num_heads, plain_of);
        const Emitted absorbed{absorbed_.get(), size_t(latent.kv_rank), latent.kv_rank};
        multiply_groups(team_, group_by_head(rank, latent.key_maps, num_tokens), rows, absorbed);
        team_.barrier();
        const PdmeshRope& rope = model_.ropes[layer.rope];
        for (int t; (t = team_.take()) < num_tokens;) {
            for (int head = 0; head < model_.num_heads; head++) place_latent_query(rank, layer, rope, t, head);
            write_latent(rank, index, latent, rope, t);
        }
    }

    void place_latent_query(int rank, const PdmeshLayer& layer, const PdmeshRope& rope, int token, int head) {
        const PdmeshLatent& latent = *layer.latent;
        float* query = heads_[rank].data();
        const float* absorbed = absorbed_.get() + (static_cast<size_t>(head) * step_->num_tokens + token) * latent.kv_rank;
        const float* own = latent_queries(latent, token) + head * (latent.nope_dim + latent.rope_dim) + latent.nope_dim;
        std::memcpy(query, absorbed, sizeof(float) * latent.kv_rank);
        turn(own, rope, step_->positions[token], latent.rope_dim, query + latent.kv_rank);
        attention_.write_query(token, 0, head, query, factor_of_query(layer, token));
    }

    // Scores are exponents of 2 from here on.
    float factor_of_query(const PdmeshLayer& layer, int token) const {
        return model_.attention_scale * kLog2E * (layer.temperatures ? layer.temperatures[step_->positions[token]] : 1.0f);
    }

    void write_latent(int rank, int index, const PdmeshLatent& latent, const PdmeshRope& rope, int token) {
        float* key = heads_[rank].data();
        const float* own = qkv_.get() + static_cast<size_t>(token) * qkv_stride_ + layers_[index].qkv.n - latent.kv_rank - latent.rope_dim;
        norm_row(latent.latent_norm, own, latent.kv_rank, key);
        turn(own + latent.kv_rank, rope, step_->positions[token], latent.rope_dim, key + latent.kv_rank);
        write_token(attention_.kv(), index, 0, step_->slots[token], attention_.plan().open_ends[token], key, key + model_.head_dim);
    }

    // Ends with a barrier.
    [[gnu::noinline]] void expand_values(int rank, const PdmeshLatent& latent, int num_rows) {
        const size_t stride = attention_.attended_stride();
        const auto latent_of = [&](int row) { return attention_.attended() + row % num_rows * stride + static_cast<size_t>(row / num_rows) * latent.kv_rank; };
        const Rows rows = prepare_each(rank, latent.value_maps[0], kNoNorm, num_rows * model_.num_heads, latent_of);
        const PerHead values{values_.get(), num_rows, size_t(values_stride(latent)), latent.value_dim};
        multiply_groups(team_, group_by_head(rank, latent.value_maps, num_rows), rows, values);
        team_.barrier();
    }

    // ---- queries, keys and values

    // Queries: norm, rotation, scale, to where attention reads them. Keys and values: into the pool.
    [[gnu::noinline]] void rotate_and_write(int rank, int index, const PdmeshLayer& layer) {
        const bool has_chains = step_->num_seqs * 2 <= step_->num_tokens;
        if (step_->num_tokens <= (has_chains ? kFewTokens : kFewTokens / 2)) return rotate_and_write_few(rank, index, layer);
        constexpr int step = 4;
        const int num_tokens = step_->num_tokens;
        for (int item; (item = team_.take()) * step < num_tokens;)
            for (int t = item * step; t < std::min(num_tokens, (item + 1) * step); t++)
                for (int head = 0; head < model_.num_kv_heads; head++) {
                    ask_for_slot(index, head, step_->slots[t]);
                    rotate_queries(rank, layer, t, head);
                    write_key_value(rank, index, layer, t, head);
                }
    }

    // Tokens that follow each other lie in the same lines of memory: one rank writes a head's keys and values of all of them.
    void rotate_and_write_few(int rank, int index, const PdmeshLayer& layer) {
        constexpr int step = 4;
        const int num_tokens = step_->num_tokens, heads = model_.num_kv_heads, pieces = (num_tokens + step - 1) / step;
        for (int item; (item = team_.take()) < heads * (1 + pieces);) {
            const int head = item % heads;
            if (item < heads) {
                for (int t = 0; t < num_tokens; t++)
                    if (t == 0 || step_->slots[t] / kGroup != step_->slots[t - 1] / kGroup) ask_for_slot(index, head, step_->slots[t]);
                for (int t = 0; t < num_tokens; t++) write_key_value(rank, index, layer, t, head);
                continue;
            }
            const int first = (item / heads - 1) * step;
            for (int t = first; t < std::min(num_tokens, first + step); t++) rotate_queries(rank, layer, t, head);
        }
    }

    void rotate_queries(int rank, const PdmeshLayer& layer, int token, int head) {
        const int dim = model_.head_dim;
        const float* row = qkv_.get() + static_cast<size_t>(token) * qkv_stride_;
        float* rotated = heads_[rank].data();
        for (int g = 0; g < groups_; g++) {
            rotate(row + (head * groups_ + g) * dim, layer, layer.query_norm, head * groups_ + g, step_->positions[token], rotated);
            attention_.write_query(token, head, g, rotated, factor_of_query(layer, token));
        }
    }

    void write_key_value(int rank, int index, const PdmeshLayer& layer, int token, int head) {
        const int dim = model_.head_dim;
        const float* row = qkv_.get() + static_cast<size_t>(token) * qkv_stride_;
        float* rotated = heads_[rank].data();
        rotate(row + (model_.num_heads + head) * dim, layer, layer.key_norm, head, step_->positions[token], rotated);
        const float* value = row + (model_.num_heads + model_.num_kv_heads + head) * dim;
        write_token(attention_.kv(), index, head, step_->slots[token], attention_.plan().open_ends[token], rotated, value);
    }

    // A token's key lies in all lines of its group: they arrive while the queries are rotated.
    [[gnu::always_inline]] void ask_for_slot(int index, int head, int64_t slot) const {
        const KVGeometry& kv = attention_.kv();
        const int in_block = static_cast<int>(slot % kv.block_size);
        const uint8_t* keys = kv.group(kv.block(index, 0, slot / kv.block_size), head, in_block);
        const uint8_t* values = kv.group(kv.block(index, 1, slot / kv.block_size), head, in_block);
        for (int at = 0; at < kv.group_bytes(); at += 64) prefetch(keys + at);
        const int panel_bytes = kv.group_bytes() / (kv.head_dim / kPanel);
        for (int at = in_block % kGroup * panel_bytes / kGroup; at < kv.group_bytes(); at += panel_bytes) prefetch(values + at);
    }

    [[gnu::noinline]] void rotate(const float* x, const PdmeshLayer& layer, const PdmeshNorm& norm, int head, int64_t position, float* out) const {
        const int dim = model_.head_dim;
        const bool has_norm = norm.weight && model_.head_norms != kOverAllHeads;
        float normed[kMostHeadDim];
        if (has_norm && !model_.norms_rotated) {
            norm_head(norm, head, x, normed);
            x = normed;
        }
        if (layer.rope < 0) std::memcpy(out, x, sizeof(float) * dim);
        else turn(x, model_.ropes[layer.rope], position, dim, out);
        if (has_norm && model_.norms_rotated) norm_head(norm, head, out, out);
    }

    [[gnu::always_inline]] void norm_head(const PdmeshNorm& norm, int head, const float* x, float* out) const {
        const int dim = model_.head_dim;
        PdmeshNorm own = norm;
        if (model_.head_norms == kOneForEachHead) own.weight += static_cast<size_t>(head) * dim;
        if (model_.head_norms == kOneForEachHead && own.bias) own.bias += static_cast<size_t>(head) * dim;
        norm_row(own, x, dim, out);
    }

    // Halves of the first rope.dim numbers are rotated, the others pass.
    [[gnu::always_inline]] static void turn(const float* x, const PdmeshRope& rope, int64_t position, int dim, float* out) {
        const int half = static_cast<int>(rope.dim / 2);
        const float *cos = rope.cos + position * half, *sin = rope.sin + position * half;
        for (int i = 0; i < half; i++) {
            out[i] = x[i] * cos[i] - x[i + half] * sin[i];
            out[i + half] = x[i + half] * cos[i] + x[i] * sin[i];
        }
        for (int i = 2 * half; i < dim; i++) out[i] = x[i];
    }

    // Rows are in ascending order, so moving each down to its place overwrites only what is not wanted any more.
    void keep_wanted_rows() {
        for (int r = 0; r < step_->num_rows; r++) {
            const size_t from = step_->logits_rows[r];
            if (from == static_cast<size_t>(r)) continue;
            move_row(hidden_.get(), hidden_stride_, from, r);
            move_row(attention_.attended(), attention_.attended_stride(), from, r);
        }
    }
    static void move_row(float* rows, size_t stride, size_t from, size_t to) {
        std::memcpy(rows + to * stride, rows + from * stride, sizeof(float) * stride);
    }

    static constexpr float kLog2E = 1.44269504f;
    static constexpr PdmeshNorm kNoNorm{};

    PdmeshModel model_;
    std::vector<PdmeshLayer> layers_;
    std::shared_ptr<Team> shared_team_;
    Team& team_;
    std::mutex mutex_;
    AttentionStage attention_;
    StepAdapters adapters_;
    int groups_, hidden_stride_, qkv_stride_;
    const PdmeshStep* step_ = nullptr;
    PdmeshProfile profile_{};
    GuestWorth worth_;
    Buffer<float> hidden_, qkv_, inner_, branch_, router_logits_, contributions_, mixed_, expanded_, absorbed_, values_;
    std::vector<std::vector<RowGroup>> head_groups_;  // of each rank
    ExpertPairs pairs_;
    std::vector<Router> routers_;
    RowBuffer shared_rows_;
    std::vector<std::unique_ptr<RowBuffer>> own_rows_;
    bool has_own_rows_ = false;  // with room, which is the same for all steps
    std::vector<std::vector<float>> heads_;
};

}  // namespace
}  // namespace pdmesh

using pdmesh::Engine;

extern "C" {

// Sizes of the structs as this library was compiled: library.py compares them with its own.
void pdmesh_abi(int64_t* sizes) {
    sizes[0] = sizeof(PdmeshLinear);
    sizes[1] = sizeof(PdmeshLayer);
    sizes[2] = sizeof(PdmeshModel);
    sizes[3] = sizeof(PdmeshStep);
    sizes[4] = sizeof(PdmeshProfile);
    sizes[5] = sizeof(PdmeshPool);
    sizes[6] = sizeof(PdmeshExperts);
    sizes[7] = sizeof(PdmeshLatent);
    sizes[8] = sizeof(PdmeshAdapterPart);
    sizes[9] = sizeof(PdmeshAdapterMap);
}

// The weights stay the caller's and must outlive the engine. Null without memory or threads. `table`: what core_table.py maps, of which the
// engine's threads have slots [first_slot, first_slot + num_threads), and on others up to `max_guests` more compute; null: nothing is lent.
void* pdmesh_engine_create(const PdmeshModel* model, int32_t num_threads, int32_t spin_us, void* table, int32_t first_slot, int32_t max_guests) {
    try {
        const pdmesh::CoreTable cores(table, first_slot, num_threads);
        return new Engine(*model, std::make_shared<pdmesh::Team>(num_threads, spin_us, cores, table ? max_guests : 0));
    } catch (const std::exception&) {
        return nullptr;
    }
}

// One that computes with the threads of `other`, which may be destroyed before it. Null without memory.
void* pdmesh_engine_create_beside(const PdmeshModel* model, void* other) {
    try {
        return new Engine(*model, static_cast<Engine*>(other)->team());
    } catch (const std::exception&) {
        return nullptr;
    }
}

void pdmesh_engine_destroy(void* engine) { delete static_cast<Engine*>(engine); }

// The engine's threads, for the sampler that runs between steps.
void* pdmesh_engine_team(void* engine) { return static_cast<Engine*>(engine)->team().get(); }

// The engine has nothing to compute: other workers may use its cores until its next step.
void pdmesh_engine_rest(void* engine) { static_cast<Engine*>(engine)->team()->rest(); }

// What the buffers of all engines have grown by, in bytes.
int64_t pdmesh_reserved_bytes() { return pdmesh::reserved_bytes; }

// 0, or 1 without memory for the step's buffers.
int32_t pdmesh_engine_step(void* engine, const PdmeshStep* step) {
    try {
        static_cast<Engine*>(engine)->step(*step);
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

}
