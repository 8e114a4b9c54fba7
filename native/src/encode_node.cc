#include <algorithm>
#include <numeric>

#include "cpu_nodes.h"
#include "json.h"
#include "unicode.h"

namespace dagserve {
namespace {

// What stands around the numbers of a reply and around each row's.
struct Form {
  std::string_view node, rows, head, before, after, between, usage, tail;
};

constexpr Form kScores = {"encode_scores",
                          "scores",
                          "{\"scores\":[",
                          "[",
                          "]",
                          "",
                          ",\"completion_tokens\":0,\"total_tokens\":",
                          "},\"object\":\"scoring\"}"};
constexpr Form kEmbeddings = {"encode_embeddings",
                              "embeddings",
                              "{\"object\":\"list\",\"data\":[",
                              "{\"object\":\"embedding\",\"embedding\":[",
                              "],\"index\":",
                              "}",
                              ",\"total_tokens\":",
                              "}}"};

// Rows of numbers as one of two services' replies: SGLang's scores, OpenAI's embeddings.
class EncodeNode final : public CpuNode {
 public:
  EncodeNode(const Config& config, const Form& form)
      : form_(form), scores_(port(config, form, form.rows)), cu_seqlens_(port(config, form, "cu_seqlens")) {
    const auto found = std::find(config.inputs.begin(), config.inputs.end(), "truncated");
    if (found != config.inputs.end()) truncated_ = found - config.inputs.begin();
    const auto& model = config.at<std::string>("model");
    if (find_invalid_utf8(model) != std::string_view::npos)
      throw std::invalid_argument(std::string(form.node) + ": model is not valid UTF-8");
    model_part_ = "],\"model\":" + json_string(model) + ",\"usage\":{\"prompt_tokens\":";
  }

  void run(std::span<const Tensor> inputs, std::span<Tensor> outputs, std::span<std::byte>,
           Status& status) const noexcept override {
    const Tensor& cu_seqlens = inputs[cu_seqlens_];
    const std::int32_t tokens = cu_seqlens.as<std::int32_t>()[cu_seqlens.shape[0] - 1];
    JsonWriter out(outputs[0].as<char>(), outputs[0].bound[0]);
    out.text(form_.head);
    write_rows(inputs[scores_], out);
    out.text(model_part_);
    out.number(tokens);
    out.text(form_.usage);
    out.number(tokens);
    if (truncated_ >= 0 && inputs[static_cast<std::size_t>(truncated_)].present) {
      const Tensor& truncated = inputs[static_cast<std::size_t>(truncated_)];
      const std::int32_t* const lost = truncated.as<std::int32_t>();
      out.text(",\"truncated_tokens\":");
      out.number(std::accumulate(lost, lost + truncated.shape[0], std::int64_t{0}));
    }
    out.text(form_.tail);
    if (out.full())
      return status.fail(Code::internal, "[%.*s] the reply is longer than its bound of %lld bytes",
                         static_cast<int>(form_.node.size()), form_.node.data(),
                         static_cast<long long>(outputs[0].bound[0]));
    outputs[0].shape[0] = out.size();
  }

 private:
  static std::size_t port(const Config& config, const Form& form, std::string_view name) {
    const auto found = std::find(config.inputs.begin(), config.inputs.end(), name);
    if (found == config.inputs.end())
      throw std::invalid_argument(std::string(form.node) + " needs the input " + std::string(name));
    return static_cast<std::size_t>(found - config.inputs.begin());
  }

  void write_rows(const Tensor& scores, JsonWriter& out) const {
    const float* value = scores.as<float>();
    for (std::int64_t row = 0; row < scores.shape[0]; ++row) {
      if (row) out.text(",");
      out.text(form_.before);
      for (std::int64_t column = 0; column < scores.shape[1]; ++column) {
        if (column) out.text(",");
        out.real(*value++);
      }
      out.text(form_.after);
      if (form_.between.empty()) continue;
      out.number(row);
      out.text(form_.between);
    }
  }

  const Form& form_;
  std::size_t scores_;
  std::size_t cu_seqlens_;
  std::ptrdiff_t truncated_ = -1;  // index of the port, -1 where it is not connected
  std::string model_part_;
};

}  // namespace

std::unique_ptr<CpuNode> make_encode_node(const Config& config) {
  return std::make_unique<EncodeNode>(config, kScores);
}

std::unique_ptr<CpuNode> make_encode_embeddings_node(const Config& config) {
  return std::make_unique<EncodeNode>(config, kEmbeddings);
}

}  // namespace dagserve
