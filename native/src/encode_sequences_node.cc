// Generated sequences as JSON: all of a request's sequences are decoded and written in one pass.
#include <algorithm>
#include <array>

#include "cpu_nodes.h"
#include "decoder.h"
#include "json.h"
#include "tables.h"
#include "unicode.h"

namespace dagserve {
namespace {

constexpr std::array<std::string_view, 17> kPorts = {
    "tokens",     "lengths",       "scores",     "counts",    "cu_seqlens",   "step_scores",
    "cumulative", "return_tokens", "request_id", "created",   "finished",     "return_scores",
    "nodes",      "item_nodes",    "items",      "permitted", "item_offsets",
};
enum Port : std::size_t {
  kTokens,
  kLengths,
  kScores,
  kCounts,
  kCuSeqlens,
  kStepScores,
  kCumulative,
  kReturnTokens,
  kRequestId,
  kCreated,
  kFinished,
  kReturnScores,
  kNodes,
  kItemNodes,
  kItems,
  kPermitted,
  kItemOffsets,
};

enum class Style { results, completions, beams };

// The tensors of one run by port; null where there is none.
struct Request {
  std::array<const Tensor*, kPorts.size()> ports{};

  const Tensor& at(Port port) const { return *ports[port]; }
  bool has(Port port) const { return ports[port] != nullptr; }
  bool is_true(Port port) const { return has(port) && at(port).as<std::uint8_t>()[0] != 0; }
  std::int64_t prompts() const { return at(kTokens).shape[0]; }
  std::int64_t width() const { return at(kTokens).shape[1]; }
  std::int64_t steps() const { return at(kTokens).shape[2]; }
  std::int32_t count(std::int64_t prompt) const { return at(kCounts).as<std::int32_t>()[prompt]; }
  std::int32_t length(std::int64_t row) const { return at(kLengths).as<std::int32_t>()[row]; }
  std::int64_t prompt_tokens() const { return at(kCuSeqlens).as<std::int32_t>()[prompts()]; }
  std::int64_t prompt_tokens(std::int64_t prompt) const {
    const std::int32_t* const ends = at(kCuSeqlens).as<std::int32_t>();
    return ends[prompt + 1] - ends[prompt];
  }
  std::span<const std::int64_t> tokens(std::int64_t row) const {
    return {at(kTokens).as<std::int64_t>() + row * steps(), static_cast<std::size_t>(length(row))};
  }
  std::int64_t generated(std::int64_t prompt) const {
    std::int64_t total = 0;
    for (std::int64_t i = 0; i < count(prompt); ++i) total += length(prompt * width() + i);
    return total;
  }
  std::int64_t generated() const {
    std::int64_t total = 0;
    for (std::int64_t prompt = 0; prompt < prompts(); ++prompt) total += generated(prompt);
    return total;
  }
};

class EncodeSequencesNode final : public CpuNode {
 public:
  explicit EncodeSequencesNode(const Config& config)
      : tables_(config.root + "/" + config.at<std::string>("tables")),
        decoder_(tables_),
        style_(style_of(config.at<std::string>("style"))) {
    for (std::size_t i = 0; i < kPorts.size(); ++i) {
      const auto found = std::ranges::find(config.inputs, kPorts[i]);
      place_[i] = found == config.inputs.end() ? -1 : found - config.inputs.begin();
    }
    for (const Port port : {kTokens, kLengths, kScores, kCounts, kCuSeqlens})
      if (place_[port] < 0)
        throw std::invalid_argument("encode_sequences needs the input " + std::string(kPorts[port]));
    for (const Port port : {kItemNodes, kItems, kPermitted, kItemOffsets})
      if ((place_[port] < 0) != (place_[kNodes] < 0))
        throw std::invalid_argument("encode_sequences: nodes goes with item_nodes, items, item_offsets and permitted");
    if (!decoder_.supported())
      throw std::invalid_argument("encode_sequences: this tokenizer's tokens cannot become text");
    if (config.input_bounds[place_[kTokens]].rank != 3)
      throw std::invalid_argument("encode_sequences: tokens has rank 3, [prompts, sequences, steps]");
    const auto& model = config.at<std::string>("model");
    if (find_invalid_utf8(model) != std::string_view::npos)
      throw std::invalid_argument("encode_sequences: model is not valid UTF-8");
    model_ = json_string(model);
    text_bytes_ = decoder_.most_bytes(static_cast<std::size_t>(config.input_bounds[place_[kTokens]].bound[2]));
  }

  // Joined bytes of one sequence, and its text.
  std::size_t workspace_bytes() const override { return 2 * text_bytes_; }

  void run(std::span<const Tensor> inputs, std::span<Tensor> outputs, std::span<std::byte> workspace,
           Status& status) const noexcept override {
    Request request;
    for (std::size_t i = 0; i < kPorts.size(); ++i)
      if (place_[i] >= 0 && inputs[place_[i]].present) request.ports[i] = &inputs[place_[i]];
    if (!check(request, status)) return;
    JsonWriter out(outputs[0].as<char>(), outputs[0].bound[0]);
    switch (style_) {
      case Style::results:
        write_results(request, workspace, out);
        break;
      case Style::completions:
        write_completions(request, workspace, out);
        break;
      case Style::beams:
        write_beams(request, workspace, out);
        break;
    }
    if (out.full())
      return status.fail(Code::internal,
                         "[encode_sequences] the reply is longer than its bound of %lld bytes; raise bytes_per_token, "
                         "or bytes_for_items",
                         static_cast<long long>(outputs[0].bound[0]));
    outputs[0].shape[0] = out.size();
  }

 private:
  static Style style_of(const std::string& name) {
    if (name == "results") return Style::results;
    if (name == "completions") return Style::completions;
    if (name == "beams") return Style::beams;
    throw std::invalid_argument("encode_sequences: unknown style " + name);
  }

  // What another node made may be anything: no count, length or token is trusted.
  bool check(const Request& request, Status& status) const {
    for (std::int64_t prompt = 0; prompt < request.prompts(); ++prompt) {
      const std::int32_t count = request.count(prompt);
      const bool fit = !request.has(kNodes) || request.at(kPermitted).shape[0] * 8 >= request.at(kItemNodes).shape[0];
      bool good = fit && count >= 0 && count <= request.width();
      for (std::int64_t i = 0; good && i < count; ++i) good = check_row(request, prompt * request.width() + i);
      if (good) continue;
      status.fail(Code::internal, "[encode_sequences] prompt %lld has a count, length or token out of range",
                  static_cast<long long>(prompt));
      return false;
    }
    return true;
  }

  bool check_row(const Request& request, std::int64_t row) const {
    const std::int32_t length = request.length(row);
    if (length < 0 || length > request.steps()) return false;
    return std::ranges::all_of(request.tokens(row), [](std::int64_t id) { return id >= 0; });
  }

  void write_text(const Request& request, std::int64_t row, std::span<std::byte> workspace, JsonWriter& out) const {
    char* const text = reinterpret_cast<char*>(workspace.data()) + text_bytes_;
    out.string({text, decoder_.decode(request.tokens(row), {}, workspace.first(text_bytes_), text)});
  }

  static void write_tokens(const Request& request, std::int64_t row, JsonWriter& out) {
    out.text("[");
    const char* before = "";
    for (const std::int64_t id : request.tokens(row)) {
      out.text(before);
      out.number(id);
      before = ",";
    }
    out.text("]");
  }

  static void write_steps(const Request& request, std::int64_t row, JsonWriter& out) {
    const float* const scores = request.at(kStepScores).as<float>() + row * request.steps();
    out.text("[");
    for (std::int32_t i = 0; i < request.length(row); ++i) {
      if (i) out.text(",");
      out.real(scores[i]);
    }
    out.text("]");
  }

  static const char* reason(const Request& request, std::int64_t row) {
    const bool stopped = request.has(kFinished) && request.at(kFinished).as<std::uint8_t>()[row] != 0;
    return stopped ? "stop" : "length";
  }

  static void write_usage(std::int64_t prompt, std::int64_t generated, JsonWriter& out) {
    out.text("{\"prompt_tokens\":");
    out.number(prompt);
    out.text(",\"completion_tokens\":");
    out.number(generated);
    out.text(",\"total_tokens\":");
    out.number(prompt + generated);
    out.text("}");
  }

  // The items of the catalog's node that a sequence ends at, but for those the request may not have.
  static void write_items(const Request& request, std::int64_t row, JsonWriter& out) {
    const std::int64_t node = request.at(kNodes).as<std::int64_t>()[row];
    const std::span<const std::int32_t> nodes(request.at(kItemNodes).as<std::int32_t>(),
                                              static_cast<std::size_t>(request.at(kItemNodes).shape[0]));
    const std::int32_t* const offsets = request.at(kItemOffsets).as<std::int32_t>();
    const char* before = "[";
    for (auto at = std::ranges::lower_bound(nodes, node) - nodes.begin();
         static_cast<std::size_t>(at) < nodes.size() && nodes[static_cast<std::size_t>(at)] == node; ++at) {
      if ((request.at(kPermitted).as<std::uint8_t>()[at / 8] >> at % 8 & 1) == 0) continue;
      if (offsets[at] < 0 || offsets[at] > offsets[at + 1] || offsets[at + 1] > request.at(kItems).shape[0]) continue;
      out.text(before);
      out.string(
          {request.at(kItems).as<char>() + offsets[at], static_cast<std::size_t>(offsets[at + 1] - offsets[at])});
      before = ",";
    }
    out.text(*before == '[' ? "[]" : "]");
  }

  void write_sequence(const Request& request, std::int64_t row, std::span<std::byte> workspace, JsonWriter& out) const {
    out.text("{\"text\":");
    write_text(request, row, workspace, out);
    out.text(",\"score\":");
    out.real(request.at(kScores).as<float>()[row]);
    if (request.has(kNodes)) {
      out.text(",\"items\":");
      write_items(request, row, out);
    }
    if (request.is_true(kReturnTokens)) {
      out.text(",\"tokens\":");
      write_tokens(request, row, out);
    }
    if (request.is_true(kReturnScores) && request.has(kCumulative)) {
      out.text(",\"cumulative\":");
      out.real(request.at(kCumulative).as<float>()[row]);
    }
    if (request.is_true(kReturnScores) && request.has(kStepScores)) {
      out.text(",\"step_scores\":");
      write_steps(request, row, out);
    }
    out.text("}");
  }

  // {"results":[{"found":2,"sequences":[{"text","score"}]}],"model","usage","object":"generation"}
  void write_results(const Request& request, std::span<std::byte> workspace, JsonWriter& out) const {
    out.text("{\"results\":[");
    for (std::int64_t prompt = 0; prompt < request.prompts(); ++prompt) {
      out.text(prompt ? ",{\"found\":" : "{\"found\":");
      out.number(request.count(prompt));
      out.text(",\"sequences\":[");
      for (std::int32_t i = 0; i < request.count(prompt); ++i) {
        if (i) out.text(",");
        write_sequence(request, prompt * request.width() + i, workspace, out);
      }
      out.text("]}");
    }
    out.text("],\"model\":");
    out.text(model_);
    out.text(",\"usage\":");
    write_usage(request.prompt_tokens(), request.generated(), out);
    out.text(",\"object\":\"generation\"}");
  }

  // OpenAI's /v1/completions: a choice for each sequence, of all prompts in order.
  void write_completions(const Request& request, std::span<std::byte> workspace, JsonWriter& out) const {
    out.text("{\"id\":\"cmpl-");
    if (request.has(kRequestId)) out.characters(request.at(kRequestId).text(0));
    out.text("\",\"object\":\"text_completion\",\"created\":");
    out.number(request.has(kCreated) ? request.at(kCreated).as<std::int64_t>()[0] : std::int64_t{0});
    out.text(",\"model\":");
    out.text(model_);
    out.text(",\"choices\":[");
    std::int64_t index = 0;
    for (std::int64_t prompt = 0; prompt < request.prompts(); ++prompt)
      for (std::int32_t i = 0; i < request.count(prompt); ++i, ++index) {
        const std::int64_t row = prompt * request.width() + i;
        out.text(index ? ",{\"index\":" : "{\"index\":");
        out.number(index);
        out.text(",\"text\":");
        write_text(request, row, workspace, out);
        out.text(",\"logprobs\":null,\"finish_reason\":\"");
        out.text(reason(request, row));
        out.text("\"}");
      }
    out.text("],\"usage\":");
    write_usage(request.prompt_tokens(), request.generated(), out);
    out.text("}");
  }

  // SGLang's /generate: one object for one prompt, a list for several; the best sequence, and all under beam_results.
  void write_beams(const Request& request, std::span<std::byte> workspace, JsonWriter& out) const {
    const bool many = request.prompts() != 1;
    if (many) out.text("[");
    for (std::int64_t prompt = 0; prompt < request.prompts(); ++prompt) {
      const std::int64_t first = prompt * request.width();
      out.text(prompt ? ",{\"text\":" : "{\"text\":");
      request.count(prompt) ? write_text(request, first, workspace, out) : out.text("\"\"");
      out.text(",\"meta_info\":{\"prompt_tokens\":");
      out.number(request.prompt_tokens(prompt));
      out.text(",\"completion_tokens\":");
      out.number(request.generated(prompt));
      out.text(",\"beam_results\":[");
      for (std::int32_t i = 0; i < request.count(prompt); ++i) {
        out.text(i ? ",{\"text\":" : "{\"text\":");
        write_text(request, first + i, workspace, out);
        out.text(",\"tokens\":");
        write_tokens(request, first + i, out);
        out.text(",\"beam_score\":");
        out.real(request.at(kScores).as<float>()[first + i]);
        out.text(",\"finish_reason\":\"");
        out.text(reason(request, first + i));
        out.text("\"}");
      }
      out.text("]}}");
    }
    if (many) out.text("]");
  }

  Tables tables_;
  Decoder decoder_;
  Style style_;
  std::array<std::ptrdiff_t, kPorts.size()> place_{};  // index of each port among the inputs, -1 where there is none
  std::string model_;
  std::size_t text_bytes_ = 0;
};

}  // namespace

std::unique_ptr<CpuNode> make_encode_sequences_node(const Config& config) {
  return std::make_unique<EncodeSequencesNode>(config);
}

}  // namespace dagserve
