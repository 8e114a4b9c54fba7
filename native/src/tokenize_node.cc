#include <algorithm>
#include <limits>

#include "cpu_nodes.h"
#include "tokenizer.h"
#include "unicode.h"

namespace dagserve {
namespace {

// A step of filling one row: literal text, the text of an input, or an added token that ends the text before it.
struct Step {
  enum class Kind { literal, input, token } kind = Kind::literal;
  std::string literal;
  std::size_t input = 0;
  std::uint32_t token = kNoToken;
};

class TokenizeNode final : public CpuNode {
 public:
  explicit TokenizeNode(const Config& config)
      : names_(config.inputs), tokenizer_(config.root + "/" + config.at<std::string>("tables")) {
    for (const auto& [name, value] : config.values)
      if (name == "max_length") max_length_ = config.at<std::int64_t>("max_length");
    if (names_.empty() || config.input_bounds.size() != names_.size())
      throw std::invalid_argument("tokenize needs at least one input");
    for (const Segment& segment : config.at<std::vector<Segment>>("template")) add(segment, config);
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
  void add(const Segment& segment, const Config& config) {
    if (segment.input >= 0) {
      const auto input = static_cast<std::size_t>(segment.input);
      if (input >= names_.size()) throw std::invalid_argument("tokenize: template names an input that is not there");
      steps_.push_back({Step::Kind::input, "", input, kNoToken});
      row_bytes_ += static_cast<std::size_t>(config.input_bounds[input].capacity);
      return;
    }
    if (find_invalid_utf8(segment.literal) != std::string_view::npos)
      throw std::invalid_argument("tokenize: template is not valid UTF-8");
    for (LiteralPart& part : tokenizer_.split_literal(segment.literal)) {
      row_bytes_ += part.text.size();
      const auto kind = part.token == kNoToken ? Step::Kind::literal : Step::Kind::token;
      steps_.push_back({kind, std::move(part.text), 0, part.token});
    }
  }

  std::size_t text_offset() const { return (Tokenizer::workspace_bytes(row_bytes_) + 63) / 64 * 64; }

  // Appends the tokens of one row: its text up to each added token is encoded as one.
  void fill(std::span<const Tensor> inputs, std::int64_t row, std::span<std::byte> workspace, TokenSink& sink) const {
    char* const text = reinterpret_cast<char*>(workspace.data()) + text_offset();
    std::size_t bytes = 0;
    for (const Step& step : steps_) {
      if (step.kind == Step::Kind::token) {
        tokenizer_.encode({text, bytes}, workspace, sink);
        sink.push(step.token);
        bytes = 0;
        continue;
      }
      const std::string_view part =
          step.kind == Step::Kind::literal ? std::string_view(step.literal) : text_of(inputs[step.input], row);
      std::copy(part.begin(), part.end(), text + bytes);
      bytes += part.size();
    }
    tokenizer_.encode({text, bytes}, workspace, sink);
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
  std::vector<Step> steps_;
  std::size_t row_bytes_ = 0;
  std::size_t row_input_ = 0;  // the first input with a row for each text; a scalar where there is none
};

}  // namespace

std::unique_ptr<CpuNode> make_tokenize_node(const Config& config) { return std::make_unique<TokenizeNode>(config); }

}  // namespace dagserve
