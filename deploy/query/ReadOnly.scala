// Guard of `kiln sql --spark`: accepts one query or listing of the lake's tables and views, with known functions only.
package kiln

import scala.io.Source
import scala.util.Using

import org.apache.spark.SparkThrowable
import org.apache.spark.sql.catalyst.analysis._
import org.apache.spark.sql.catalyst.expressions.Expression
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan
import org.apache.spark.sql.execution.command.SetCommand

/** The statement is refused. */
class Refused(what: String) extends UnsupportedOperationException(s"the lake is read-only: $what") with SparkThrowable {
  override def getCondition: String = "KILN_READ_ONLY"
  override def getErrorClass: String = getCondition
  override def getSqlState: String = "42501"
}

/** Checks parsed statements against lists of allowed parts. The check comes before the analysis, because Spark evaluates some functions,
  * options and table functions while it analyzes a statement. */
object ReadOnly {
  // Statements and clauses, as Spark's parser names them. Whatever hides a name in an expression (IDENTIFIER) or SQL in a string
  // (EXECUTE IMMEDIATE, BEGIN … END) is not among them.
  private val plans = words("""
    Project Filter Aggregate Join LateralJoin AsOfJoin Sort GlobalLimit LocalLimit Offset Distinct Deduplicate Union Intersect Except
    RepartitionByExpression PipeOperator UnresolvedQualify SubqueryAlias UnresolvedWith Generate Window WithWindowDefinition Pivot Unpivot Sample OneRowRelation LocalRelation
    UnresolvedHint UnresolvedHaving UnresolvedRelation UnresolvedInlineTable ResolvedInlineTable UnresolvedTableValuedFunction
    UnresolvedTVFAliases UnresolvedSubqueryColumnAliases RelationTimeTravel
    ExplainCommand SetCommand SetCatalogAndNamespace SetNamespaceCommand ShowCatalogsCommand ShowCurrentNamespaceCommand
    ShowNamespaces ShowNamespacesCommand ShowTables ShowTablesExtended ShowTableProperties ShowViews ShowColumns ShowFunctions
    ShowCreateTable DescribeRelation DescribeColumn DescribeQueryCommand DescribeNamespace DescribeFunction
    UnresolvedTable UnresolvedTableOrView UnresolvedView UnresolvedNamespace CurrentNamespace UnresolvedFunctionName
  """)

  // Allowed expressions that stand for a name to look up. Expressions of the package `catalyst.expressions` only compute, and are all allowed.
  private val expressions = words("""
    UnresolvedAttribute UnresolvedStar UnresolvedStarExcept UnresolvedStarExceptOrReplace UnresolvedStarWithColumns UnresolvedRegex
    UnresolvedAlias UnresolvedExtractValue UnresolvedSubqueryColumnAliases UnresolvedFunction UnresolvedOrdinal UnresolvedGenerator
    UnresolvedPipeAggregateOrdinal     MultiAlias Star NamedRelation
  """)

  /** Maximum number of arguments of each allowed function. */
  private val functions: Map[String, Int] =
    Using.resource(Source.fromInputStream(getClass.getResourceAsStream("/functions.txt"), "UTF-8")) { source =>
      val names = source.getLines().filterNot(_.startsWith("#")).flatMap(words)
      names.map(_.split('/')).map(each => each(0) -> each.lift(1).fold(Int.MaxValue)(_.toInt)).toMap
    }

  private def words(text: String): Set[String] = text.split("\\s+").filter(_.nonEmpty).toSet

  /** Throws Refused if the parsed statement contains something that is not on the lists. */
  def check(part: Any): Unit = part match {
    case set: SetCommand => if (!shows(set)) refuse("a query cannot change settings, and can show only those of Spark SQL: SET -v, SET spark.sql.NAME")
    case plan: LogicalPlan =>
      allow(plan.getClass, plans, plan.nodeName)
      checkName(plan)
      plan.productIterator.foreach(check)
    case expression: Expression =>
      if (!expression.getClass.getName.startsWith("org.apache.spark.sql.catalyst.expressions."))
        allow(expression.getClass, expressions, expression.prettyName)
      expression match {
        case call: UnresolvedFunction => checkCall(call.nameParts, call.arguments.size)
        case call: UnresolvedGenerator => checkCall(call.name.nameParts, call.children.size)
        case _ =>
      }
      expression.productIterator.foreach(check)
    case several: Iterable[_] => several.foreach(check)
    case several: Product => several.productIterator.foreach(check) // pairs, options and Spark's records of clauses
    case _ =>
  }

  private def allow(kind: Class[_], list: Set[String], name: String): Unit = {
    val known = kind.getName.startsWith("org.apache.spark.sql.") && !kind.getName.startsWith("org.apache.spark.sql.delta.")
    if (!known || !list.contains(kind.getSimpleName.stripSuffix("$"))) refuse(s"$name is not allowed, only queries are")
  }

  // A path is a name of two parts: parquet.`/path`.
  private def checkName(plan: LogicalPlan): Unit = plan match {
    case relation: UnresolvedRelation =>
      checkQualifier(relation.multipartIdentifier)
      if (!relation.options.isEmpty || relation.isStreaming) refuse("a table cannot have options, and cannot be read as a stream")
    case table: UnresolvedTable => checkQualifier(table.multipartIdentifier)
    case table: UnresolvedTableOrView => checkQualifier(table.multipartIdentifier)
    case view: UnresolvedView => checkQualifier(view.multipartIdentifier)
    case namespace: UnresolvedNamespace => checkQualifier(namespace.multipartIdentifier :+ "")
    case call: UnresolvedTableValuedFunction => checkCall(call.name, call.functionArgs.size)
    case _ =>
  }

  private def checkQualifier(name: Seq[String]): Unit =
    if (!Set("", "default", "spark_catalog", "spark_catalog.default").contains(name.init.mkString(".").toLowerCase))
      refuse(s"${name.init.mkString(".")} is not allowed, only the tables and views in default are")

  private def checkCall(name: Seq[String], arguments: Int): Unit = {
    val builtin = Set("", "builtin", "system.builtin").contains(name.init.mkString(".").toLowerCase)
    val most = if (builtin) functions.getOrElse(name.last.toLowerCase, -1) else -1
    if (most < 0) refuse(s"the function ${name.mkString(".")} is not allowed")
    if (arguments > most) refuse(s"the function ${name.mkString(".")} cannot have options")
  }

  // SET -v lists Spark's own settings of SQL.
  private def shows(set: SetCommand): Boolean = set.kv.exists { case (key, value) =>
    value.isEmpty && (key == "-v" || key.startsWith("spark.sql."))
  }

  private def refuse(what: String): Nothing = throw new Refused(what)
}
