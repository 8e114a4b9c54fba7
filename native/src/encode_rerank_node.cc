#include <algorithm>
#include <cmath>

#include "cpu_nodes.h"
#include "json.h"

namespace dagserve {
namespace {

class EncodeRerankNode final : public CpuNode {
 public:
  explicit EncodeRerankNode(const Config& config)
      : column_(config.get<std::int64_t>("column", 0)), rows_(config.input_bounds.at(0).bound[0]) {
    if (column_ >= config.input_bounds[0].bound[1])
      throw std::invalid_argument("encode_rerank: column is out of range");
  }

  std::size_t workspace_bytes() const override { return static_cast<std::size_t>(rows_) * sizeof(std::int32_t); }

  void run(std::span<const Tensor> inputs, std::span<Tensor> outputs, std::span<std::byte> workspace,
           Status& status) const noexcept override {
    const Tensor& scores = inputs[0];
    if (column_ >= scores.shape[1])
      return status.fail(Code::invalid_request, "[encode_rerank] the request has %lld labels; column %lld is not there",
                         static_cast<long long>(scores.shape[1]), static_cast<long long>(column_));
    const float* const values = scores.as<float>() + column_;
    const auto score = [&](std::int32_t row) { return values[row * scores.shape[1]]; };
    auto* const order = reinterpret_cast<std::int32_t*>(workspace.data());
    auto* const end = order + scores.shape[0];
    for (std::int32_t row = 0; row < scores.shape[0]; ++row) order[row] = row;
    std::sort(order, end, [&](std::int32_t a, std::int32_t b) {
      if (std::isnan(score(a)) || std::isnan(score(b)))
        return std::isnan(score(a)) == std::isnan(score(b)) ? a < b : std::isnan(score(b));
      return score(a) != score(b) ? score(a) > score(b) : a < b;
    });
    JsonWriter out(outputs[0].as<char>(), outputs[0].bound[0]);
    for (const std::int32_t* row = order; row != end; ++row) {
      out.text(row == order ? "[{\"index\":" : ",{\"index\":");
      out.number(*row);
      out.text(",\"score\":");
      out.real(score(*row));
      out.text("}");
    }
    out.text(scores.shape[0] == 0 ? "[]" : "]");
    if (out.full())
      return status.fail(Code::internal, "[encode_rerank] the reply is longer than its bound of %lld bytes",
                         static_cast<long long>(outputs[0].bound[0]));
    outputs[0].shape[0] = out.size();
  }

 private:
  std::int64_t column_;
  std::int64_t rows_;
};

}  // namespace

std::unique_ptr<CpuNode> make_encode_rerank_node(const Config& config) {
  return std::make_unique<EncodeRerankNode>(config);
}

}  // namespace dagserve
