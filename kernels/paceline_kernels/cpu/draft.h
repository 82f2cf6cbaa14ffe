// A draft model runs ahead of its target: pass after pass in one call, each feeding back what the pass before has chosen.
#pragma once

#include "decoder.h"
#include "sampling.h"

namespace {

enum Kind : int32_t { MOST_PROBABLE, BY_KEY, DRAWN };

// The draft number `pass` of sequence `seq`, from its logits, which it may change.
inline int64_t choose(const PacelineChoices& choices, int64_t seq, int64_t pass, int64_t max_depth, float* logits,
                      int64_t vocab) {
    const int32_t kind = choices.kinds ? choices.kinds[seq] : MOST_PROBABLE;
    if (kind == MOST_PROBABLE) return argmax_of(logits, vocab);
    thread_local Selection selection;
    const float temperature = choices.temperatures[seq];
    const Limits limits{temperature, choices.top_p[seq], choices.min_p[seq], choices.typical_p[seq], choices.top_k[seq]};
    truncate_row(logits, vocab, limits, selection);
    if (kind == BY_KEY) {
        int64_t key[4];
        std::copy_n(choices.keys + 4 * seq, 4, key);
        key[2] += pass;
        return gumbel_argmax_row(logits, vocab, temperature, Noise(key));
    }
    thread_local std::vector<double> sums;
    softmax_row(logits, vocab, temperature);
    std::copy_n(logits, vocab, choices.probs + (choices.first_rows[seq] + pass) * vocab);
    return draw_row(logits, vocab, choices.uniforms[seq * max_depth + pass], sums);
}

// The rows of a batch, then one row of each sequence that goes on.
template <class T>
class Drafting {
public:
    Drafting(Decoder<T>& model, const PacelineBatch& batch) : model_(model), batch_(batch) {}

    // Sequence i gets depths[i] drafts -> out [num_seqs, max_depth].
    void run(const int32_t* depths, int64_t max_depth, const PacelineChoices& choices, int64_t* out) {
        const int64_t vocab = model_.vocab_size();
        std::vector<int64_t> last_rows;
        for (int64_t seq = 0; seq < batch_.num_seqs; ++seq) {
            if (depths[seq] <= 0) continue;
            last_rows.push_back(batch_.query_starts[seq + 1] - 1);
            going_.push_back(seq);
        }
        static thread_local Scratch memory;  // pages that were written before are at hand
        float* const logits = memory.get<float>(going_.size() * vocab);
        model_.logits_of(batch_, last_rows.data(), (int64_t)last_rows.size(), logits);
        for (int64_t pass = 0; !going_.empty(); ++pass) {
            const int64_t count = (int64_t)going_.size();
#pragma omp parallel for schedule(dynamic) num_threads(batch_.num_threads) if (count > 1)
            for (int64_t i = 0; i < count; ++i) {
                out[going_[i] * max_depth + pass] =
                    choose(choices, going_[i], pass, max_depth, logits + i * vocab, vocab);
            }
            const auto done = [&](int64_t seq) { return depths[seq] <= pass + 1; };
            going_.erase(std::remove_if(going_.begin(), going_.end(), done), going_.end());
            if (!going_.empty()) feed_back(out, max_depth, pass, logits);
        }
    }

private:
    // The logits behind the newest draft of every sequence that goes on.
    void feed_back(const int64_t* drafts, int64_t max_depth, int64_t pass, float* logits) {
        starts_.assign(1, 0);
        contexts_.clear();
        tables_.clear();
        token_ids_.clear();
        for (const int64_t seq : going_) {
            starts_.push_back((int32_t)starts_.size());
            contexts_.push_back(batch_.context_lens[seq] + (int32_t)pass + 1);
            token_ids_.push_back(drafts[seq * max_depth + pass]);
            const int32_t* const blocks = batch_.block_tables + seq * batch_.max_blocks;
            tables_.insert(tables_.end(), blocks, blocks + batch_.max_blocks);
        }
        PacelineBatch next = batch_;
        next.num_seqs = (int64_t)going_.size();
        next.token_ids = token_ids_.data();
        next.query_starts = starts_.data();
        next.context_lens = contexts_.data();
        next.block_tables = tables_.data();
        model_.logits_of(next, nullptr, next.num_seqs, logits);
    }

    Decoder<T>& model_;
    const PacelineBatch& batch_;
    std::vector<int64_t> going_;  // sequences, ascending
    std::vector<int32_t> starts_, contexts_, tables_;
    std::vector<int64_t> token_ids_;
};

}  // namespace
