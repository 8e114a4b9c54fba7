#include <algorithm>
#include <cstring>

#include "cpu_nodes.h"

namespace dagserve {
namespace {

// Packed texts with the tokens that all begin with taken out and put first, as row 0.
class SharePrefixNode final : public CpuNode {
 public:
  explicit SharePrefixNode(const Config& config) {
    if (config.output_bounds[kTokens].bound[0] < config.input_bounds[kTokens].bound[0] ||
        config.output_bounds[kCuSeqlens].bound[0] <= config.input_bounds[kCuSeqlens].bound[0])
      throw std::invalid_argument("share_prefix: its outputs are smaller than its inputs");
  }

  void run(std::span<const Tensor> inputs, std::span<Tensor> outputs, std::span<std::byte>,
           Status& status) const noexcept override {
    const std::int64_t* const tokens = inputs[kTokens].as<std::int64_t>();
    const std::int32_t* const ends = inputs[kCuSeqlens].as<std::int32_t>();
    const std::int64_t rows = inputs[kCuSeqlens].shape[0] - 1;
    if (!is_packed(inputs[kTokens], ends, rows))
      return status.fail(Code::invalid_request,
                         "[share_prefix] cu_seqlens must rise from 0 to the number of tokens, %lld",
                         static_cast<long long>(inputs[kTokens].shape[0]));
    const std::int32_t shared = rows > 1 ? common_prefix(tokens, ends, rows) : 0;
    std::int64_t* out = std::copy_n(tokens, shared, outputs[kTokens].as<std::int64_t>());
    std::int32_t* const out_ends = outputs[kCuSeqlens].as<std::int32_t>();
    out_ends[0] = 0;
    out_ends[1] = shared;
    for (std::int64_t row = 0; row < rows; ++row) {
      out = std::copy(tokens + ends[row] + shared, tokens + ends[row + 1], out);
      out_ends[row + 2] = out_ends[row + 1] + (ends[row + 1] - ends[row] - shared);
    }
    outputs[kTokens].shape[0] = out_ends[rows + 1];
    outputs[kCuSeqlens].shape[0] = rows + 2;
  }

 private:
  enum Port : std::size_t { kTokens, kCuSeqlens };

  static bool is_packed(const Tensor& tokens, const std::int32_t* ends, std::int64_t rows) {
    return ends[0] == 0 && ends[rows] == tokens.shape[0] && std::is_sorted(ends, ends + rows + 1);
  }

  // How many tokens all rows begin with; of each row at least one is left.
  static std::int32_t common_prefix(const std::int64_t* tokens, const std::int32_t* ends, std::int64_t rows) {
    std::int32_t shared = std::max(0, ends[1] - 1);
    for (std::int64_t row = 1; row < rows && shared > 0; ++row) {
      const std::int64_t* const begin = tokens + ends[row];
      shared = std::min(shared, std::max(0, ends[row + 1] - ends[row] - 1));
      shared = static_cast<std::int32_t>(std::mismatch(tokens, tokens + shared, begin).first - tokens);
    }
    return shared;
  }
};

}  // namespace

std::unique_ptr<CpuNode> make_share_prefix_node(const Config& config) {
  return std::make_unique<SharePrefixNode>(config);
}

}  // namespace dagserve
