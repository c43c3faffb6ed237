// The loss curve as a picture: SVG by hand, since text, lines and circles need no library.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>

#include "trainer/monitor.h"
#include "trainer/monitor_text.h"

namespace kinoe {
namespace {

// Pixels. The plot area is what the margins leave.
constexpr double kWidth = 960, kHeight = 540, kLeft = 76, kRight = 28, kTop = 84, kBottom = 62;
constexpr double kPlotWidth = kWidth - kLeft - kRight, kPlotHeight = kHeight - kTop - kBottom;

constexpr const char* kTrainColor = "#2463ae";
constexpr const char* kValidationColor = "#c8452f";
constexpr const char* kReferenceColor = "#2e7d4f";
constexpr const char* kSmall = "font-size=\"13\" fill=\"#57606a\"";

std::string escaped(const std::string& text) {
  std::string result;
  for (const char c : text) {
    switch (c) {
      case '&': result += "&amp;"; break;
      case '<': result += "&lt;"; break;
      case '>': result += "&gt;"; break;
      case '"': result += "&quot;"; break;
      default: result += c;
    }
  }
  return result;
}

// ---- The curves ----------------------------------------------------------------------------------------------------

std::vector<LossPoint> finite_points(const std::vector<LossPoint>& points) {
  std::vector<LossPoint> result;
  std::copy_if(points.begin(), points.end(), std::back_inserter(result),
               [](const LossPoint& point) { return std::isfinite(point.loss); });
  return result;
}

size_t smoothing_reach(size_t points) { return points / 40; }  // 0: a short run is shown as it is

/// Mean over a window of neighbours: as wide before as after while that exists, so that the steep start is not
/// lifted; at the end only the past is averaged.
std::vector<LossPoint> smoothed(const std::vector<LossPoint>& points) {
  const size_t n = points.size(), widest = smoothing_reach(n);
  std::vector<double> sums(n + 1, 0.0);
  for (size_t i = 0; i < n; ++i) sums[i + 1] = sums[i] + points[i].loss;
  std::vector<LossPoint> result;
  for (size_t i = 0; i < n; ++i) {
    const size_t reach = std::min(i, widest), begin = i - reach, end = std::min(n, i + reach + 1);
    result.push_back({points[i].step, (sums[end] - sums[begin]) / static_cast<double>(end - begin)});
  }
  return result;
}

/// At most two points for each column of pixels, its lowest and its highest: the picture of a million steps is the
/// same and the file stays small.
std::vector<LossPoint> thinned(const std::vector<LossPoint>& points) {
  const size_t columns = static_cast<size_t>(kPlotWidth), n = points.size();
  if (n <= 2 * columns) return points;
  std::vector<LossPoint> result;
  for (size_t c = 0; c < columns; ++c) {
    const auto begin = points.begin() + static_cast<ptrdiff_t>(c * n / columns);
    const auto end = points.begin() + static_cast<ptrdiff_t>((c + 1) * n / columns);
    auto [low, high] = std::minmax_element(
        begin, end, [](const LossPoint& a, const LossPoint& b) { return a.loss < b.loss; });
    if (high < low) std::swap(low, high);
    result.push_back(*low);
    if (high != low) result.push_back(*high);
  }
  return result;
}

// ---- Axes ----------------------------------------------------------------------------------------------------------

/// What an axis shows. A logarithmic one gives the long flat end of a loss curve the room that its steep start
/// would take.
struct Axis {
  double low = 0, high = 1;
  bool logarithmic = false;

  /// 0 at low, 1 at high.
  [[nodiscard]] double share(double value) const {
    if (!logarithmic) return (value - low) / (high - low);
    return value > 0 ? std::log(value / low) / std::log(high / low) : -1e6;
  }
};

/// The values an axis must show: all but the highest hundredth (spikes run out of the top instead of flattening the
/// rest), the first always.
void add_bounds(const std::vector<LossPoint>& points, std::vector<double>& bounds) {
  if (points.empty()) return;
  std::vector<double> losses;
  for (const LossPoint& point : points) losses.push_back(point.loss);
  bounds.push_back(losses.front());
  std::sort(losses.begin(), losses.end());
  bounds.push_back(losses.front());
  bounds.push_back(losses[losses.size() - 1 - losses.size() / 100]);
}

/// Room is left below the lowest value for the label of the reference.
Axis vertical_axis(const LossHistory& history, const LossCurveStyle& style) {
  constexpr double kRoomAbove = 0.04, kRoomBelow = 0.10, kLogarithmicFrom = 2.5;
  std::vector<double> bounds;
  add_bounds(history.train, bounds);
  add_bounds(history.validation, bounds);
  if (style.reference) bounds.push_back(*style.reference);
  if (bounds.empty()) return {};
  const double low = *std::min_element(bounds.begin(), bounds.end());
  const double high = *std::max_element(bounds.begin(), bounds.end());
  if (low > 0 && high > kLogarithmicFrom * low) {
    const double ratio = high / low;
    return {low * std::pow(ratio, -kRoomBelow), high * std::pow(ratio, kRoomAbove), true};
  }
  const double height = std::max(high - low, 1e-3 * std::max(1.0, std::fabs(high)));
  return {low - height * kRoomBelow, low + height * (1 + kRoomAbove), false};
}

struct Tick {
  double value;
  std::string label;
};

/// Marks 1, 2 or 5 times a power of ten apart, about `wanted` of them.
std::vector<Tick> even_ticks(const Axis& axis, int wanted) {
  const double raw = (axis.high - axis.low) / wanted;
  const double power = std::pow(10.0, std::floor(std::log10(raw)));
  const double lead = raw / power;
  const double step = power * (lead <= 1 ? 1 : lead <= 2 ? 2 : lead <= 5 ? 5 : 10);
  const int decimals = std::max(0, static_cast<int>(-std::floor(std::log10(step) + 1e-9)));
  const double first = std::ceil(axis.low / step - 1e-9);
  const int count = static_cast<int>(std::floor(axis.high / step + 1e-9) - first) + 1;
  std::vector<Tick> ticks;
  for (int i = 0; i < count; ++i) {
    const double value = (first + i) * step;
    ticks.push_back({value, format("%.*f", decimals, value)});
  }
  return ticks;
}

/// Marks at round numbers of each decade, fewer a decade where there are many.
std::vector<Tick> logarithmic_ticks(const Axis& axis) {
  const double decades = std::log10(axis.high / axis.low);
  std::vector<double> leads = {1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8};
  if (decades > 1.2) leads = {1, 2, 5};
  if (decades > 3) leads = {1};
  std::vector<Tick> ticks;
  const int first = static_cast<int>(std::floor(std::log10(axis.low)));
  for (int decade = first; decade <= first + static_cast<int>(decades) + 1; ++decade)
    for (const double lead : leads)
      if (const double value = lead * std::pow(10.0, decade); value >= axis.low && value <= axis.high)
        ticks.push_back({value, format("%g", value)});
  return ticks;
}

/// Whole steps, "150k" and "1.5M" where they are many.
std::vector<Tick> step_ticks(const Axis& axis) {
  std::vector<Tick> ticks;
  for (const Tick& tick : even_ticks(axis, 8)) {
    const double value = tick.value;
    if (value != std::floor(value)) continue;
    ticks.push_back({value, value >= 1e6   ? format("%gM", value * 1e-6)
                            : value >= 1e4 ? format("%gk", value * 1e-3)
                                           : format("%g", value)});
  }
  return ticks;
}

// ---- Drawing -------------------------------------------------------------------------------------------------------

/// The picture as it grows: data coordinates in, elements out.
class Canvas {
 public:
  Canvas(const Axis& x, const Axis& y) : x_(x), y_(y) {}

  [[nodiscard]] double px(double x) const { return kLeft + x_.share(x) * kPlotWidth; }
  [[nodiscard]] double py(double y) const { return kTop + (1 - y_.share(y)) * kPlotHeight; }

  void add(const std::string& element) { body_ += element + "\n"; }

  void line(double x1, double y1, double x2, double y2, const std::string& style) {
    add(format("<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" %s/>", x1, y1, x2, y2, style.c_str()));
  }

  void text(double x, double y, const char* anchor, const char* style, const std::string& words) {
    add(format("<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\" %s>", x, y, anchor, style) + escaped(words) +
        "</text>");
  }

  void circle(double x, double y, const char* color) {
    add(format(
        "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"4\" fill=\"%s\" stroke=\"#ffffff\" stroke-width=\"1.2\"/>", x, y,
        color));
  }

  void dot(const LossPoint& point, const char* color) {
    circle(px(static_cast<double>(point.step)), py(point.loss), color);
  }

  void curve(const std::vector<LossPoint>& points, const std::string& style) {
    if (points.size() < 2) return;
    std::string path;
    for (const LossPoint& point : points)
      path += format("%s%.1f %.1f", path.empty() ? "M" : "L", px(static_cast<double>(point.step)),
                     // What is far outside is clipped anyway, and not every viewer draws huge coordinates.
                     std::clamp(py(point.loss), -10 * kHeight, 10 * kHeight));
    add("<path clip-path=\"url(#plot)\" fill=\"none\" stroke-linejoin=\"round\" " + style + " d=\"" + path +
        "\"/>");
  }

  [[nodiscard]] std::string finish() const {
    return format(
               "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %g %g\" width=\"%g\" height=\"%g\" "
               "font-family=\"system-ui, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, sans-serif\">\n",
               kWidth, kHeight, kWidth, kHeight) +
           format("<clipPath id=\"plot\"><rect x=\"%g\" y=\"%g\" width=\"%g\" height=\"%g\"/></clipPath>\n",
                  kLeft, kTop, kPlotWidth, kPlotHeight) +
           "<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n" + body_ + "</svg>\n";
  }

 private:
  Axis x_, y_;
  std::string body_;
};

void draw_axes(Canvas& canvas, const Axis& x, const Axis& y, const LossCurveStyle& style) {
  const double bottom = kTop + kPlotHeight, right = kLeft + kPlotWidth;
  for (const Tick& tick : y.logarithmic ? logarithmic_ticks(y) : even_ticks(y, 6)) {
    const double at = canvas.py(tick.value);
    canvas.line(kLeft, at, right, at, "stroke=\"#e6e9ed\"");
    canvas.text(kLeft - 10, at + 4.5, "end", kSmall, tick.label);
  }
  for (const Tick& tick : step_ticks(x)) {
    const double at = canvas.px(tick.value);
    canvas.line(at, bottom, at, bottom + 5, "stroke=\"#8c959f\"");
    canvas.text(at, bottom + 21, "middle", kSmall, tick.label);
  }
  canvas.line(kLeft, kTop, kLeft, bottom, "stroke=\"#8c959f\"");
  canvas.line(kLeft, bottom, right, bottom, "stroke=\"#8c959f\"");
  canvas.text(kLeft + kPlotWidth / 2, kHeight - 16, "middle", kSmall, "step");
  canvas.add(format("<g transform=\"translate(20 %.1f) rotate(-90)\">", kTop + kPlotHeight / 2));
  canvas.text(0, 0, "middle", kSmall, style.y_label + (y.logarithmic ? ", log scale" : ""));
  canvas.add("</g>");
  canvas.text(kLeft, 36, "start", "font-size=\"20\" font-weight=\"600\" fill=\"#1f2328\"", style.title);
}

/// The label is below the line: the curve comes down to it from above.
void draw_reference(Canvas& canvas, double value, const std::string& label) {
  const double at = canvas.py(value), right = kLeft + kPlotWidth;
  canvas.line(kLeft, at, right, at,
              format("stroke=\"%s\" stroke-width=\"1.6\" stroke-dasharray=\"7 5\"", kReferenceColor));
  const std::string style =
      format("font-size=\"13\" fill=\"%s\" stroke=\"#ffffff\" stroke-width=\"3\" paint-order=\"stroke\"",
             kReferenceColor);
  canvas.text(right - 4, at + 17, "end", style.c_str(), label);
}

void draw_validation(Canvas& canvas, const std::vector<LossPoint>& points) {
  canvas.curve(points, format("stroke=\"%s\" stroke-width=\"1.4\" stroke-opacity=\"0.7\"", kValidationColor));
  if (points.size() > 100) return;  // circles would only be a thick line
  for (const LossPoint& point : points)
    if (canvas.py(point.loss) >= kTop) canvas.dot(point, kValidationColor);
}

/// One row under the title, each entry with the last value of its curve.
void draw_legend(Canvas& canvas, const LossHistory& history, const std::vector<LossPoint>& smooth) {
  constexpr double kY = 59, kLetter = 7.3;  // the width of a letter, about
  double x = kLeft + 1;
  const auto entry = [&](const char* color, const std::string& words) {
    canvas.line(x, kY, x + 24, kY, format("stroke=\"%s\" stroke-width=\"2.4\"", color));
    canvas.text(x + 32, kY + 4.5, "start", "font-size=\"13\" fill=\"#24292f\"", words);
    x += 60 + kLetter * static_cast<double>(words.size());
  };
  if (!smooth.empty())
    entry(kTrainColor, format("training %.4f%s", smooth.back().loss,
                              smoothing_reach(smooth.size()) > 0 ? " (smoothed)" : ""));
  if (!history.validation.empty()) {
    canvas.circle(x + 12, kY, kValidationColor);
    entry(kValidationColor, format("validation %.4f", history.validation.back().loss));
  }
}

}  // namespace

std::string loss_curve_svg(const LossHistory& given, const LossCurveStyle& style) {
  const LossHistory history{finite_points(given.train), finite_points(given.validation)};
  Axis x;
  for (const std::vector<LossPoint>* points : {&history.train, &history.validation})
    if (!points->empty()) x.high = std::max(x.high, static_cast<double>(points->back().step));
  const Axis y = vertical_axis(history, style);
  const std::vector<LossPoint> smooth = smoothed(history.train);

  Canvas canvas(x, y);
  draw_axes(canvas, x, y, style);
  canvas.curve(thinned(history.train),
               format("stroke=\"%s\" stroke-width=\"1\" stroke-opacity=\"0.28\"", kTrainColor));
  if (style.reference) draw_reference(canvas, *style.reference, style.reference_label);
  canvas.curve(thinned(smooth), format("stroke=\"%s\" stroke-width=\"2.4\"", kTrainColor));
  if (smooth.size() == 1) canvas.dot(smooth.front(), kTrainColor);
  draw_validation(canvas, history.validation);
  draw_legend(canvas, history, smooth);
  if (history.train.empty() && history.validation.empty())
    canvas.text(kWidth / 2, kHeight / 2, "middle", kSmall, "no losses were recorded");
  return canvas.finish();
}

void write_loss_curve(const std::string& path, const LossHistory& history, const LossCurveStyle& style) {
  if (!path.ends_with(".svg"))
    fail(ExitCode::usage, path, ": the loss curve is written as SVG: give a name that ends in .svg");
  const std::string temporary = path + ".tmp";
  std::ofstream out(temporary, std::ios::binary);
  out << loss_curve_svg(history, style);
  out.close();
  if (!out || std::rename(temporary.c_str(), path.c_str()) != 0) {
    std::remove(temporary.c_str());
    fail(ExitCode::usage, path,
         ": the loss curve cannot be written there; check the path and the free space");
  }
}

}  // namespace kinoe
