#include <algorithm>
#include <cstdint>
#include <limits>

#include "cpu_nodes.h"
#include "decoder.h"
#include "tokenizer.h"
#include "unicode.h"

namespace dagserve {
namespace {

// What happens to a field of too many tokens.
enum class Side { none, error, left, right, middle };

Side parse_side(const std::string& name) {
  constexpr std::pair<std::string_view, Side> kSides[] = {
      {"error", Side::error}, {"left", Side::left}, {"right", Side::right}, {"middle", Side::middle}};
  for (const auto& [known, side] : kSides)
    if (known == name) return side;
  throw std::invalid_argument("tokenize: no side is called '" + name + "'");
}

// A part of a row: literal text, or the text of an input.
struct Part {
  std::string literal;
  std::ptrdiff_t input = -1;
  bool open = true;  // added tokens are looked for in it
  Side side = Side::none;
  std::int64_t most = 0;          // tokens of its own
  std::vector<std::int64_t> ids;  // of literal text that is encoded on its own
  std::size_t bytes = 0;          // its text has at most
};

class TokenizeNode final : public CpuNode {
 public:
  explicit TokenizeNode(const Config& config)
      : names_(config.get<std::vector<std::string>>("names", config.inputs)),
        tokenizer_(config.root + "/" + config.at<std::string>("tables")),
        decoder_(tokenizer_.tables()),
        joint_(config.get<std::int64_t>("joint", 1) != 0) {
    if (config.get<std::int64_t>("special_tokens", 1) != 0) {
      before_ = tokenizer_.tables().before();
      after_ = tokenizer_.tables().after();
    }
    max_length_ = config.get<std::int64_t>("max_length", max_length_);
    if (names_.empty() || config.inputs.size() != names_.size())
      throw std::invalid_argument("tokenize needs at least one input");
    for (const Segment& segment : config.at<std::vector<Segment>>("template")) add(segment, config);
    for (std::size_t i = names_.size(); i-- > 0;)
      if (config.input_bounds[i].rank > 0) row_input_ = i;
    for (const Part& part : parts_) {
      row_bytes_ += part.bytes;
      if (part.side != Side::none) shortened_bytes_ = std::max(shortened_bytes_, part.bytes);
      widest_ = std::max(widest_, part.bytes);
    }
    if (!joint_) {
      std::vector<std::byte> workspace(workspace_bytes() + 64);
      const std::span<std::byte> aligned(
          workspace.data() + (64 - reinterpret_cast<std::uintptr_t>(workspace.data()) % 64), workspace_bytes());
      for (Part& part : parts_)
        if (part.input < 0) encode_literal(part, aligned);
    }
  }

  std::size_t workspace_bytes() const override { return lay_out({}).end; }

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
    const Layout layout = lay_out(workspace);
    cu_seqlens[0] = 0;
    for (std::int64_t row = 0; row < rows; ++row) {
      const std::int64_t before = sink.count;
      std::int64_t removed = 0;
      fill(inputs, row, layout, sink, removed, status);
      if (!status.ok() || !check_length(inputs, row, sink.count - before, status)) return;
      cu_seqlens[row + 1] = static_cast<std::int32_t>(std::min(sink.count, sink.capacity));
      if (outputs.size() > 2) outputs[2].as<std::int32_t>()[row] = static_cast<std::int32_t>(removed);
    }
    if (sink.count > sink.capacity)
      return status.fail(Code::invalid_request,
                         "[tokenize] the request has %lld tokens with the template, over the bound of %lld; "
                         "send fewer or shorter texts",
                         static_cast<long long>(sink.count), static_cast<long long>(sink.capacity));
    outputs[0].shape[0] = sink.count;
    outputs[1].shape[0] = rows + 1;
    if (outputs.size() > 2) outputs[2].shape[0] = rows;
  }

 private:
  // Where things are in the workspace.
  struct Layout {
    std::span<std::byte> encoding;  // the tokenizer's
    Open* open;                     // the parts of a row in which added tokens are looked for
    char* text;                     // a row's
    std::span<std::int64_t> ids;    // of a field on its own
    std::span<std::byte> joining;   // the decoder's
    char* shortened;                // what is left of a field
    std::size_t end;
  };

  Layout lay_out(std::span<std::byte> workspace) const {
    Layout layout{};
    std::size_t at = 0;
    const auto take = [&](std::size_t bytes) {
      std::byte* const taken = workspace.data() + at;
      at += (bytes + 63) / 64 * 64;
      return taken;
    };
    const std::size_t encoding = tokenizer_.workspace_bytes(joint_ ? row_bytes_ : widest_);
    layout.encoding = {take(encoding), encoding};
    layout.open = reinterpret_cast<Open*>(take(parts_.size() * sizeof(Open)));
    layout.text = reinterpret_cast<char*>(take(joint_ ? row_bytes_ : 0));
    layout.ids = {reinterpret_cast<std::int64_t*>(take(shortened_bytes_ * sizeof(std::int64_t))), shortened_bytes_};
    layout.joining = {take(shortened_bytes_), shortened_bytes_};
    layout.shortened = reinterpret_cast<char*>(take(shortened_bytes_));
    layout.end = at;
    return layout;
  }

  void add(const Segment& segment, const Config& config) {
    Part part;
    if (segment.input < 0) {
      if (find_invalid_utf8(segment.literal) != std::string_view::npos)
        throw std::invalid_argument("tokenize: template is not valid UTF-8");
      part.literal = segment.literal;
      part.bytes = segment.literal.size();
      parts_.push_back(std::move(part));
      return;
    }
    const auto input = static_cast<std::size_t>(segment.input);
    if (input >= names_.size()) throw std::invalid_argument("tokenize: template names an input that is not there");
    part.input = segment.input;
    const auto allowed = config.get<std::vector<std::string>>("allow_added_tokens", {});
    part.open = std::find(allowed.begin(), allowed.end(), config.inputs[input]) != allowed.end();
    part.bytes = static_cast<std::size_t>(config.input_bounds[input].capacity);
    const auto fields = config.get<std::vector<std::string>>("truncate_fields", {});
    const auto place =
        static_cast<std::size_t>(std::find(fields.begin(), fields.end(), config.inputs[input]) - fields.begin());
    if (place < fields.size()) {
      part.side = parse_side(config.at<std::vector<std::string>>("truncate_sides").at(place));
      part.most = config.at<std::vector<std::int64_t>>("truncate_tokens").at(place);
      if (part.side != Side::error && !decoder_.supported())
        throw std::invalid_argument(
            "tokenize: this tokenizer's tokens cannot become text again, so nothing can be truncated");
      const Options& options = tokenizer_.tables().options();
      part.bytes = 3 * (options.ratio * part.bytes + options.extra);  // what is left may have U+FFFD in it
    }
    parts_.push_back(std::move(part));
  }

  void encode_literal(Part& part, std::span<std::byte> workspace) const {
    part.ids.resize(3 * part.literal.size() + 64);
    TokenSink sink{part.ids.data(), std::ssize(part.ids), 0};
    const Open everything{0, part.literal.size()};
    tokenizer_.encode(part.literal, {&everything, 1}, workspace, sink);
    part.ids.resize(static_cast<std::size_t>(sink.count));
  }

  // Appends the tokens of one row.
  void fill(std::span<const Tensor> inputs, std::int64_t row, const Layout& layout, TokenSink& sink,
            std::int64_t& removed, Status& status) const {
    for (const std::uint32_t id : before_) sink.push(id);
    if (joint_)
      fill_joint(inputs, row, layout, sink, removed, status);
    else
      fill_apart(inputs, row, layout, sink, removed, status);
    for (const std::uint32_t id : after_) sink.push(id);
  }

  // All parts as one text. Added tokens are looked for in open parts, and across those that follow one another.
  void fill_joint(std::span<const Tensor> inputs, std::int64_t row, const Layout& layout, TokenSink& sink,
                  std::int64_t& removed, Status& status) const {
    std::size_t opened = 0;
    std::size_t bytes = 0;
    bool closed = true;
    for (const Part& part : parts_) {
      std::string_view text = part.input < 0 ? std::string_view(part.literal) : field(inputs, part, row);
      if (part.side != Side::none) {
        const auto ids = shorten(inputs, part, row, layout, removed, status);
        if (!status.ok()) return;
        if (ids.data() != nullptr)
          text = {layout.shortened, decoder_.decode(ids, {true, false}, layout.joining, layout.shortened)};
      }
      std::copy(text.begin(), text.end(), layout.text + bytes);
      if (part.open && closed) layout.open[opened++] = {bytes, bytes};
      bytes += text.size();
      if (part.open) layout.open[opened - 1].end = bytes;
      closed = !part.open;
    }
    tokenizer_.encode({layout.text, bytes}, {layout.open, opened}, layout.encoding, sink);
  }

  // Each part on its own.
  void fill_apart(std::span<const Tensor> inputs, std::int64_t row, const Layout& layout, TokenSink& sink,
                  std::int64_t& removed, Status& status) const {
    for (const Part& part : parts_) {
      if (part.input < 0) {
        for (const std::int64_t id : part.ids) sink.push(static_cast<std::uint32_t>(id));
        continue;
      }
      if (part.side != Side::none) {
        const auto ids = shorten(inputs, part, row, layout, removed, status);
        if (!status.ok()) return;
        for (const std::int64_t id : ids) sink.push(static_cast<std::uint32_t>(id));
        if (ids.data() != nullptr) continue;
      }
      encode_field(field(inputs, part, row), part, layout, sink);
    }
  }

  void encode_field(std::string_view text, const Part& part, const Layout& layout, TokenSink& sink) const {
    const Open everything{0, text.size()};
    tokenizer_.encode(text, {&everything, part.open ? 1u : 0u}, layout.encoding, sink);
  }

  // The tokens that are left of a field; null where it has few enough. A cut never lies inside a character.
  std::span<const std::int64_t> shorten(std::span<const Tensor> inputs, const Part& part, std::int64_t row,
                                        const Layout& layout, std::int64_t& removed, Status& status) const {
    TokenSink sink{layout.ids.data(), std::ssize(layout.ids), 0};
    encode_field(field(inputs, part, row), part, layout, sink);
    const std::int64_t count = sink.count;
    if (count <= part.most) return {};
    std::int64_t* const ids = layout.ids.data();
    std::int64_t head = part.side == Side::right ? part.most : part.side == Side::left ? 0 : (part.most + 1) / 2;
    std::int64_t tail = count - (part.most - head);
    if (part.side == Side::error) {
      char place[128];
      status.fail(Code::invalid_request, "[tokenize] %s has %lld tokens, over its %lld; shorten it",
                  name_row(inputs, static_cast<std::size_t>(part.input), row, place), static_cast<long long>(count),
                  static_cast<long long>(part.most));
      return {};
    }
    while (head > 0 && decoder_.begins_inside(ids[head])) --head;
    while (tail < count && decoder_.begins_inside(ids[tail])) ++tail;
    std::copy(ids + tail, ids + count, ids + head);
    removed += tail - head;
    return {ids, static_cast<std::size_t>(head + count - tail)};
  }

  static std::string_view field(std::span<const Tensor> inputs, const Part& part, std::int64_t row) {
    return text_of(inputs[static_cast<std::size_t>(part.input)], row);
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

  std::vector<std::string> names_;  // what messages call each input
  Tokenizer tokenizer_;
  Decoder decoder_;
  bool joint_;
  std::int64_t max_length_ = std::numeric_limits<std::int64_t>::max();
  std::span<const std::uint32_t> before_, after_;  // what the post-processor puts around a row
  std::vector<Part> parts_;
  std::size_t row_bytes_ = 0;        // the longest row
  std::size_t widest_ = 0;           // the longest part
  std::size_t shortened_bytes_ = 0;  // the longest part that may be truncated
  std::size_t row_input_ = 0;        // the first input with a row for each text; a scalar where there is none
};

}  // namespace

std::unique_ptr<CpuNode> make_tokenize_node(const Config& config) { return std::make_unique<TokenizeNode>(config); }

}  // namespace dagserve
