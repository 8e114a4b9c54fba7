#include <algorithm>
#include <limits>

#include "cpu_nodes.h"
#include "tokenizer.h"
#include "unicode.h"

namespace dagserve {
namespace {

// A step of filling one row: literal text, or the text of an input.
struct Step {
  std::string literal;
  std::ptrdiff_t input = -1;
  bool open = true;  // added tokens are looked for in it
};

class TokenizeNode final : public CpuNode {
 public:
  explicit TokenizeNode(const Config& config)
      : names_(config.inputs), tokenizer_(config.root + "/" + config.at<std::string>("tables")) {
    max_length_ = config.get<std::int64_t>("max_length", max_length_);
    const bool around = config.get<std::int64_t>("special_tokens", 1) != 0;
    if (around) before_ = tokenizer_.tables().before();
    if (around) after_ = tokenizer_.tables().after();
    const auto allowed = config.get<std::vector<std::string>>("allow_added_tokens", {});
    if (names_.empty() || config.input_bounds.size() != names_.size())
      throw std::invalid_argument("tokenize needs at least one input");
    for (const Segment& segment : config.at<std::vector<Segment>>("template")) add(segment, config, allowed);
    for (std::size_t i = names_.size(); i-- > 0;)
      if (config.input_bounds[i].rank > 0) row_input_ = i;
  }

  std::size_t workspace_bytes() const override { return text_offset() + row_bytes_; }

  void run(std::span<const Tensor> inputs, std::span<Tensor> outputs, std::span<std::byte> workspace,
           Status& status) const noexcept override {
    std::int64_t rows = 1;
    if (!check_rows(inputs, rows, status) || !check_utf8(inputs, status)) return;
    if (rows > outputs[1].bound[0] - 1)
      return status.fail(Code::invalid_request, "[tokenize] %s has %lld texts, over the bound of %lld; send fewer",
                         names_[row_input_].c_str(), static_cast<long long>(rows),
                         static_cast<long long>(outputs[1].bound[0] - 1));
    TokenSink sink{outputs[0].as<std::int64_t>(), outputs[0].bound[0], 0};
    std::int32_t* cu_seqlens = outputs[1].as<std::int32_t>();
    cu_seqlens[0] = 0;
    for (std::int64_t row = 0; row < rows; ++row) {
      const std::int64_t before = sink.count;
      fill(inputs, row, workspace, sink);
      if (!check_length(inputs, row, sink.count - before, status)) return;
      cu_seqlens[row + 1] = static_cast<std::int32_t>(std::min(sink.count, sink.capacity));
    }
    if (sink.count > sink.capacity)
      return status.fail(Code::invalid_request,
                         "[tokenize] the request has %lld tokens with the template, over the bound of %lld; "
                         "send fewer or shorter texts",
                         static_cast<long long>(sink.count), static_cast<long long>(sink.capacity));
    outputs[0].shape[0] = sink.count;
    outputs[1].shape[0] = rows + 1;
  }

 private:
  void add(const Segment& segment, const Config& config, const std::vector<std::string>& allowed) {
    if (segment.input >= 0) {
      const auto input = static_cast<std::size_t>(segment.input);
      if (input >= names_.size()) throw std::invalid_argument("tokenize: template names an input that is not there");
      const bool open = std::find(allowed.begin(), allowed.end(), names_[input]) != allowed.end();
      steps_.push_back({"", segment.input, open});
      row_bytes_ += static_cast<std::size_t>(config.input_bounds[input].capacity);
      return;
    }
    if (find_invalid_utf8(segment.literal) != std::string_view::npos)
      throw std::invalid_argument("tokenize: template is not valid UTF-8");
    row_bytes_ += segment.literal.size();
    steps_.push_back({segment.literal, -1, true});
  }

  // The workspace holds the tokenizer's, then the parts of a row in which added tokens are looked for, then its text.
  std::size_t open_offset() const { return (tokenizer_.workspace_bytes(row_bytes_) + 63) / 64 * 64; }
  std::size_t text_offset() const { return open_offset() + steps_.size() * sizeof(Open); }

  // Appends the tokens of one row. Added tokens are looked for in open parts, and across those that follow one another.
  void fill(std::span<const Tensor> inputs, std::int64_t row, std::span<std::byte> workspace, TokenSink& sink) const {
    auto* const open = reinterpret_cast<Open*>(workspace.data() + open_offset());
    char* const text = reinterpret_cast<char*>(workspace.data()) + text_offset();
    std::size_t parts = 0;
    std::size_t bytes = 0;
    bool closed = true;
    for (const Step& step : steps_) {
      const std::string_view part =
          step.input < 0 ? std::string_view(step.literal) : text_of(inputs[static_cast<std::size_t>(step.input)], row);
      std::copy(part.begin(), part.end(), text + bytes);
      if (step.open && closed) open[parts++] = {bytes, bytes};
      bytes += part.size();
      if (step.open) open[parts - 1].end = bytes;
      closed = !step.open;
    }
    for (const std::uint32_t id : before_) sink.push(id);
    tokenizer_.encode({text, bytes}, {open, parts}, workspace, sink);
    for (const std::uint32_t id : after_) sink.push(id);
  }

  static std::string_view text_of(const Tensor& input, std::int64_t row) {
    return input.text(input.rank == 0 ? 0 : row);
  }

  bool check_rows(std::span<const Tensor> inputs, std::int64_t& rows, Status& status) const {
    for (std::size_t i = 0; i < names_.size(); ++i) {
      const char* name = names_[i].c_str();
      if (!inputs[i].present) {
        status.fail(Code::invalid_request, "[tokenize] %s is missing; give it", name);
      } else if (inputs[i].rank > 0 && inputs[i].rows() == 0) {
        status.fail(Code::invalid_request, "[tokenize] %s is empty; give at least one text", name);
      } else if (inputs[i].rank > 0 && i == row_input_) {
        rows = inputs[i].rows();
      } else if (inputs[i].rank > 0 && inputs[i].rows() != rows) {
        status.fail(Code::invalid_request, "[tokenize] %s has %lld texts but %s has %lld; give as many",
                    names_[row_input_].c_str(), static_cast<long long>(rows), name,
                    static_cast<long long>(inputs[i].rows()));
      }
      if (!status.ok()) return false;
    }
    return true;
  }

  bool check_utf8(std::span<const Tensor> inputs, Status& status) const {
    for (std::size_t i = 0; i < names_.size(); ++i) {
      for (std::int64_t row = 0; row < inputs[i].rows(); ++row) {
        const std::size_t offset = find_invalid_utf8(inputs[i].text(row));
        if (offset == std::string_view::npos) continue;
        char place[128];
        status.fail(Code::invalid_request, "[tokenize] %s is not valid UTF-8 at byte %zu; send UTF-8 text",
                    name_row(inputs, i, row, place), offset);
        return false;
      }
    }
    return true;
  }

  bool check_length(std::span<const Tensor> inputs, std::int64_t row, std::int64_t tokens, Status& status) const {
    char place[128];
    if (tokens == 0)
      status.fail(Code::invalid_request, "[tokenize] %s has no tokens with the template; send some text",
                  name_row(inputs, row_input_, row, place));
    else if (tokens > max_length_)
      status.fail(Code::invalid_request,
                  "[tokenize] %s has %lld tokens with the template, over max_length %lld; shorten it",
                  name_row(inputs, row_input_, row, place), static_cast<long long>(tokens),
                  static_cast<long long>(max_length_));
    return status.ok();
  }

  // `items[3]`, or `query` for a scalar.
  const char* name_row(std::span<const Tensor> inputs, std::size_t input, std::int64_t row, char (&place)[128]) const {
    if (inputs[input].rank == 0) return names_[input].c_str();
    std::snprintf(place, sizeof(place), "%s[%lld]", names_[input].c_str(), static_cast<long long>(row));
    return place;
  }

  std::vector<std::string> names_;
  Tokenizer tokenizer_;
  std::int64_t max_length_ = std::numeric_limits<std::int64_t>::max();
  std::span<const std::uint32_t> before_, after_;  // what the post-processor puts around a row
  std::vector<Step> steps_;
  std::size_t row_bytes_ = 0;
  std::size_t row_input_ = 0;  // the first input with a row for each text; a scalar where there is none
};

}  // namespace

std::unique_ptr<CpuNode> make_tokenize_node(const Config& config) { return std::make_unique<TokenizeNode>(config); }

}  // namespace dagserve
