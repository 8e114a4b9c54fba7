#include <algorithm>
#include <array>
#include <cmath>

#include "cpu_nodes.h"
#include "json.h"
#include "unicode.h"

namespace dagserve {
namespace {

// Rows of scores as vLLM's classification reply: of each row the best label, and the scores of all.
class EncodeClassesNode final : public CpuNode {
 public:
  explicit EncodeClassesNode(const Config& config) {
    for (std::size_t i = 0; i < kNames.size(); ++i) {
      const auto found = std::ranges::find(config.inputs, kNames[i]);
      ports_[i] = found == config.inputs.end() ? -1 : found - config.inputs.begin();
    }
    if (ports_[kScores] < 0 || ports_[kCuSeqlens] < 0)
      throw std::invalid_argument("encode_classes needs the inputs scores and cu_seqlens");
    for (const std::string& label : config.at<std::vector<std::string>>("labels")) labels_.push_back(quoted(label));
    if (std::ssize(labels_) != config.input_bounds[static_cast<std::size_t>(ports_[kScores])].bound[1])
      throw std::invalid_argument("encode_classes: as many labels are needed as scores has columns");
    model_ = quoted(config.at<std::string>("model"));
  }

  void run(std::span<const Tensor> inputs, std::span<Tensor> outputs, std::span<std::byte>,
           Status& status) const noexcept override {
    const Tensor& cu_seqlens = *given(inputs, kCuSeqlens);
    const std::int32_t tokens = cu_seqlens.as<std::int32_t>()[cu_seqlens.shape[0] - 1];
    JsonWriter out(outputs[0].as<char>(), outputs[0].bound[0]);
    out.text("{\"id\":\"classify-");
    if (const Tensor* const id = given(inputs, kRequestId)) out.characters(id->text(0));
    out.text("\",\"object\":\"list\",\"created\":");
    const Tensor* const created = given(inputs, kCreated);
    out.number(created ? created->as<std::int64_t>()[0] : std::int64_t{0});
    out.text(",\"model\":");
    out.text(model_);
    out.text(",\"data\":[");
    write_rows(*given(inputs, kScores), out);
    out.text("],\"usage\":{\"prompt_tokens\":");
    out.number(tokens);
    out.text(",\"completion_tokens\":0,\"total_tokens\":");
    out.number(tokens);
    out.text("}}");
    if (out.full())
      return status.fail(Code::internal, "[encode_classes] the reply is longer than its bound of %lld bytes",
                         static_cast<long long>(outputs[0].bound[0]));
    outputs[0].shape[0] = out.size();
  }

 private:
  static constexpr std::array<std::string_view, 4> kNames = {"scores", "cu_seqlens", "request_id", "created"};
  enum Port : std::size_t { kScores, kCuSeqlens, kRequestId, kCreated };

  static std::string quoted(const std::string& text) {
    if (find_invalid_utf8(text) != std::string_view::npos)
      throw std::invalid_argument("encode_classes: a label or the model is not valid UTF-8");
    return json_string(text);
  }

  const Tensor* given(std::span<const Tensor> inputs, Port port) const {
    const std::ptrdiff_t index = ports_[port];
    return index >= 0 && inputs[static_cast<std::size_t>(index)].present ? &inputs[static_cast<std::size_t>(index)]
                                                                         : nullptr;
  }

  // A score that is not a number is never the best one.
  static std::int64_t best(const float* row, std::int64_t columns) {
    std::int64_t place = 0;
    for (std::int64_t i = 1; i < columns; ++i)
      if (row[i] > row[place] || (std::isnan(row[place]) && !std::isnan(row[i]))) place = i;
    return place;
  }

  void write_rows(const Tensor& scores, JsonWriter& out) const {
    const std::int64_t columns = scores.shape[1];
    for (std::int64_t row = 0; row < scores.shape[0]; ++row) {
      const float* const values = scores.as<float>() + row * columns;
      out.text(row ? ",{\"index\":" : "{\"index\":");
      out.number(row);
      out.text(",\"label\":");
      out.text(labels_[static_cast<std::size_t>(best(values, columns))]);
      out.text(",\"probs\":[");
      for (std::int64_t i = 0; i < columns; ++i) {
        if (i) out.text(",");
        out.real(values[i]);
      }
      out.text("],\"num_classes\":");
      out.number(columns);
      out.text("}");
    }
  }

  std::array<std::ptrdiff_t, kNames.size()> ports_{};  // -1 where a port is not connected
  std::vector<std::string> labels_;
  std::string model_;
};

}  // namespace

std::unique_ptr<CpuNode> make_encode_classes_node(const Config& config) {
  return std::make_unique<EncodeClassesNode>(config);
}

}  // namespace dagserve
